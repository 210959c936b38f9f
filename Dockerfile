# Three images from one source. `docker build --target router .` is small, and so is `--target bridge`,
# the agent beside an engine; `--target worker-agent` has torch for the reference engine, with CUDA as
# PyPI ships it. Every package is installed by version and hash (deploy/images; `make locks`). For another
# build of torch, lock it first (deploy/README.md), and add `--build-arg PIP_EXTRA_INDEX_URL=…`; for another
# CUDA give an image with Python 3.11 as `--build-arg AGENT_BASE=…`. A digest pins more than a version:
# `--build-arg BASE=python:3.11.13-slim-bookworm@sha256:…`. `docker build --sbom=true` finds every
# package, since each image has them in one virtual environment.
ARG BASE=python:3.11.13-slim-bookworm
ARG AGENT_BASE=python:3.11.13-slim-bookworm

FROM ${BASE} AS wheel
COPY deploy/images/build.txt /locks/build.txt
RUN python3 -m venv /build && /build/bin/pip install --no-cache-dir \
  --require-hashes --requirement /locks/build.txt
WORKDIR /src
COPY pyproject.toml hatch_build.py README.md LICENSE THIRD_PARTY.md ./
COPY router router
COPY worker_agent worker_agent
RUN /build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM ${BASE} AS installed
COPY deploy/images/router.txt /locks/router.txt
COPY --from=wheel /wheels /wheels
RUN python3 -m venv --without-pip /opt/kv-router/venv \
  && python3 -m pip --python /opt/kv-router/venv/bin/python install --no-cache-dir \
  --require-hashes --requirement /locks/router.txt \
  && python3 -m pip --python /opt/kv-router/venv/bin/python install --no-deps --no-index \
  "$(find /wheels -name '*.whl')"

FROM ${AGENT_BASE} AS installed-agent
ARG PIP_EXTRA_INDEX_URL=""
COPY deploy/images/agent.txt /locks/agent.txt
COPY --from=wheel /wheels /wheels
RUN python3 -m venv --without-pip /opt/kv-router/venv \
  && python3 -m pip --python /opt/kv-router/venv/bin/python install --no-cache-dir \
  --require-hashes --requirement /locks/agent.txt \
  && python3 -m pip --python /opt/kv-router/venv/bin/python install --no-deps --no-index \
  "$(find /wheels -name '*.whl')"

# Kernels are compiled where they run from, for any CPU, and copied to /tmp by processes.
FROM ${BASE} AS slim
ENV PATH=/opt/kv-router/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
ENV NUMBA_CACHE_DIR=/opt/kv-router/kernels NUMBA_CPU_NAME=generic
RUN useradd --uid 10001 --no-create-home kv
COPY --from=installed /opt/kv-router /opt/kv-router
RUN python -m router.warm && chmod -R go+rX,go-w "$NUMBA_CACHE_DIR"
USER 10001

FROM slim AS router
LABEL org.opencontainers.image.title="kv-router" org.opencontainers.image.licenses="Apache-2.0"
ENV KV_ROUTER_HOST=0.0.0.0 KV_ROUTER_INDEXER_HOST=0.0.0.0 KV_ROUTER_FORWARD_HOST=0.0.0.0
EXPOSE 8000 8090 8092
HEALTHCHECK --interval=5s --timeout=3s --start-period=10s CMD ["kv-router", "health"]
ENTRYPOINT ["kv-router"]
CMD ["serve"]

FROM slim AS bridge
LABEL org.opencontainers.image.title="kv-router bridge" org.opencontainers.image.licenses="Apache-2.0"
ENV KV_ROUTER_AGENT_HOST=0.0.0.0 KV_ROUTER_AGENT_HTTP_PORT=8001
EXPOSE 8001
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s CMD ["kv-worker-agent", "health"]
ENTRYPOINT ["kv-worker-agent"]
CMD ["run"]

FROM ${AGENT_BASE} AS worker-agent
ENV PATH=/opt/kv-router/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
ENV NUMBA_CACHE_DIR=/opt/kv-router/kernels NUMBA_CPU_NAME=generic
LABEL org.opencontainers.image.title="kv-router agent" org.opencontainers.image.licenses="Apache-2.0"
USER 0
RUN useradd --uid 10001 --no-create-home kv
COPY --from=installed-agent /opt/kv-router /opt/kv-router
RUN python -m router.warm && chmod -R go+rX,go-w "$NUMBA_CACHE_DIR"
USER 10001
ENV KV_ROUTER_AGENT_HOST=0.0.0.0 KV_ROUTER_AGENT_HTTP_PORT=8000
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s CMD ["kv-worker-agent", "health"]
ENTRYPOINT ["kv-worker-agent"]
CMD ["run"]
