"""Subset hints in all forms, and the headers that steer."""

import pytest

from router.errors import InvalidFieldError
from router.forward.picker.pool import PoolEndpoint, address_of, members
from router.forward.picker.steering import SERVED, SUBSET, served_address, steering_in, subset_of


class Pods:
    """Pods 10.0.0.1 to 3, each with these ports, as a pool."""

    def __init__(self, *ports):
        self.addresses = [f"10.0.0.{number}:{port}" for number in (1, 2, 3) for port in ports]

    def endpoints(self):
        return [PoolEndpoint(at, index, None, at) for index, at in enumerate(self.addresses)]


def chosen(hint, *ports):
    found = members(Pods(*(ports or (8080,))), subset_of(hint))
    return [each.address.removeprefix("10.0.0.") for each in found]


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (["10.0.0.3:8080"], ["3:8080"]),
        ("10.0.0.2:8080,10.0.0.3:8080", ["2:8080", "3:8080"]),
        ([], []),
        ("", []),
        ("192.168.1.1:8080", []),
        ("  10.0.0.2:8080 ,  ,  10.0.0.3:8080  ", ["2:8080", "3:8080"]),
        (["10.0.0.2:8080, 10.0.0.3:8080"], ["2:8080", "3:8080"]),
        ([7, "10.0.0.2:8080", None], ["2:8080"]),
        (None, []),
        (3.0, []),
    ],
)
def test_subset_hint_in_any_form_limits_the_pool(hint, expected):
    assert chosen({SUBSET: hint}) == expected


@pytest.mark.parametrize("hint", [None, {}, {"other": "10.0.0.1:8080"}])
def test_without_hint_the_whole_pool_is_eligible(hint):
    assert len(chosen(hint)) == 3


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        ("10.0.0.1:8080", ["1:8080"]),
        ("10.0.0.1", ["1:8080", "1:9090"]),
        ("10.0.0.1:8080,10.0.0.2", ["1:8080", "2:8080", "2:9090"]),
        ("10.0.0.1:3000", []),
    ],
)
def test_address_without_port_means_all_its_ports(hint, expected):
    assert chosen({SUBSET: hint}, 8080, 9090) == expected


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1:8000"),
        ("http://10.0.0.1", "10.0.0.1:80"),
        ("https://10.0.0.1", "10.0.0.1:443"),
        ("http://[::1]:8000", "[::1]:8000"),
    ],
)
def test_address_has_always_a_port(url, expected):
    assert address_of(url) == expected


def test_steering_headers_are_read_llm_ds_name_first_and_removed():
    found = steering_in(
        (
            (b"x-gateway-inference-objective", b"batch"),
            (b"x-llm-d-inference-objective", b"chat"),
            (b"x-gateway-model-name-rewrite", b" m "),
            (b"x-gateway-destination-endpoint", b"1.2.3.4:5"),
            (b"prefer", b"return=minimal, if-available"),
            (b"accept", b"*/*"),
        )
    )
    assert (found.objective, found.model, found.if_available) == ("chat", "m", True)
    assert set(found.removed) == {
        "x-gateway-inference-objective",
        "x-llm-d-inference-objective",
        "x-gateway-model-name-rewrite",
        "x-gateway-destination-endpoint",
    }


def test_long_model_name_is_refused():
    with pytest.raises(InvalidFieldError, match="model-name-rewrite"):
        steering_in(((b"x-gateway-model-name-rewrite", b"m" * 300),))


@pytest.mark.parametrize(
    ("served", "expected"),
    [
        ("10.0.0.2:3000", "10.0.0.2:3000"),
        ("10.0.0.1:80, 10.0.0.2:80", "10.0.0.2:80"),
        ("", None),
        (4, None),
    ],
)
def test_served_endpoint_is_the_last_of_a_list(served, expected):
    assert served_address({"envoy.lb": {SERVED: served}}, {}) == expected
