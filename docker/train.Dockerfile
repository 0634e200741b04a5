# Train, score, predict and export: docker build -f docker/train.Dockerfile -t lit-data .
# Without a GPU: add --build-arg TORCH_INDEX=URL, that of the CPU wheels in PyTorch's installation guide
FROM python:3.12-slim
ARG TORCH_INDEX=
ARG EXTRAS=export,calibrate,sweep
WORKDIR /src
RUN pip install --no-cache-dir torch ${TORCH_INDEX:+--index-url ${TORCH_INDEX}}
COPY pyproject.toml setup.py README.md LICENSE ./
COPY lit_data lit_data
COPY lit_inspect lit_inspect
RUN pip install --no-cache-dir ".[${EXTRAS}]"
WORKDIR /work
ENV LIT_DATA_CACHE=/work/cache
ENTRYPOINT ["lit-data"]
CMD ["--help"]
