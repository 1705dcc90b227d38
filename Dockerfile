# GPU image: autotune beside the torch, CUDA and SGLang of an official SGLang image.
#   docker build -t autotune .
#   docker run --gpus all --shm-size 16g -v "$PWD:/home/autotune/job" autotune launch job/job.yaml
ARG SGLANG_TAG=v0.5.23
FROM lmsysorg/sglang:${SGLANG_TAG}

ENV PIP_NO_CACHE_DIR=1 \
    PIP_BREAK_SYSTEM_PACKAGES=1 \
    PYTHONUNBUFFERED=1

COPY pyproject.toml setup.py README.md LICENSE /opt/autotune/
COPY src /opt/autotune/src
COPY orchestrator /opt/autotune/orchestrator
COPY launchers /opt/autotune/launchers
COPY policies /opt/autotune/policies
COPY configs /opt/autotune/configs

# The image's torch and transformers satisfy the extra, so that pip leaves them as they are. The number is no user's
# of Ubuntu's images, and without a name Kubernetes can tell that it is not root's.
RUN python3 -m pip install "/opt/autotune[builtin]" \
    && useradd --create-home --uid 10001 --shell /bin/bash autotune

USER 10001
WORKDIR /home/autotune
ENTRYPOINT ["autotune"]
CMD ["--help"]
