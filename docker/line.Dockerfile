# Verdicts at the line, without torch: docker build -f docker/line.Dockerfile -t lit-inspect .
FROM python:3.12-slim
WORKDIR /src
COPY lit_inspect lit_inspect
RUN pip install --no-cache-dir ./lit_inspect
WORKDIR /work
ENTRYPOINT ["lit-inspect"]
CMD ["--help"]
