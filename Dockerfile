# Three images from one source. `docker build --target router .` is small, and so is `--target bridge`,
# the agent beside an engine; `--target worker-agent` has torch for the reference engine, with CUDA as
# PyPI ships it. For a CPU build add
# `--build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu`.

FROM python:3.11-slim AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY router router
COPY worker_agent worker_agent
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# Kernels are compiled here for any CPU, and copied to /tmp by the processes that run them.
ENV NUMBA_CACHE_DIR=/opt/kv-router/kernels NUMBA_CPU_NAME=generic
RUN useradd --uid 10001 --no-create-home kv
COPY constraints.txt /constraints.txt
COPY --from=wheel /wheels /wheels

FROM base AS router
RUN pip install --no-cache-dir --constraint /constraints.txt /wheels/*.whl \
  && python -m router.warm
USER 10001
ENV KV_ROUTER_HOST=0.0.0.0 KV_ROUTER_INDEXER_HOST=0.0.0.0
EXPOSE 8090 8092
HEALTHCHECK --interval=5s --timeout=3s --start-period=10s CMD ["kv-router", "health"]
ENTRYPOINT ["kv-router"]
CMD ["serve"]

FROM base AS bridge
RUN pip install --no-cache-dir --constraint /constraints.txt /wheels/*.whl \
  && python -m router.warm
USER 10001
ENV KV_ROUTER_AGENT_HOST=0.0.0.0 KV_ROUTER_AGENT_HTTP_PORT=8001
EXPOSE 8001
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s CMD ["kv-worker-agent", "health"]
ENTRYPOINT ["kv-worker-agent"]
CMD ["run"]

FROM base AS worker-agent
ARG PIP_EXTRA_INDEX_URL=""
RUN pip install --no-cache-dir --constraint /constraints.txt \
  "$(find /wheels -name '*.whl')[agent]" \
  && python -m router.warm
USER 10001
ENV KV_ROUTER_AGENT_HOST=0.0.0.0 KV_ROUTER_AGENT_HTTP_PORT=8000
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s CMD ["kv-worker-agent", "health"]
ENTRYPOINT ["kv-worker-agent"]
CMD ["run"]
