import httpx
from conformance.http_workers import HttpWorkers


async def test_workers_answer_whatever_they_are_asked():
    workers = HttpWorkers()
    urls = await workers.start(2)
    try:
        assert len(set(urls)) == 2
        async with httpx.AsyncClient() as client:
            for url in urls:
                assert (await client.get(f"{url}/health")).status_code == 200
                answer = await client.post(f"{url}/v1/completions", json={"prompt": [1, 2]})
                assert answer.json()["choices"][0]["text"] == "x"
    finally:
        await workers.stop()
