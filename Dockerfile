# An image with the tool, and one to build programs in. docs/guide/versions.md tells what of it has been run.
#
#   docker build -t tessera .                         # the tool: docker run --rm tessera plan --parameters 7e9 --ranks 8
#   docker build --target development -t tessera-dev .      # g++, CMake, LibTorch and Tessera, as a base for images of programs
#
# TORCH_VERSION chooses LibTorch; CPU_WHEELS names the index with its wheels without CUDA.

FROM debian:12 AS compilers
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates cmake g++ libcli11-dev libfmt-dev libmbedtls-dev libxxhash-dev \
       ninja-build nlohmann-json3-dev python3-pip \
    && rm -rf /var/lib/apt/lists/*

# LibTorch is the folder torch/ of PyTorch's wheel. C++ needs none of the wheel's Python dependencies.
FROM compilers AS libtorch
ARG TORCH_VERSION=2.13.0
ARG CPU_WHEELS=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --no-deps --target /tmp/wheel --extra-index-url "$CPU_WHEELS" "torch==$TORCH_VERSION+cpu" \
    && mv /tmp/wheel/torch /opt/libtorch \
    && rm -r /tmp/wheel

FROM libtorch AS build
COPY CMakeLists.txt /src/
COPY cmake /src/cmake/
COPY include /src/include/
COPY core /src/core/
COPY dialects /src/dialects/
COPY interop /src/interop/
COPY loop /src/loop/
COPY trace /src/trace/
COPY planner /src/planner/
COPY command /src/command/
COPY launcher /src/launcher/
COPY benchmarks /src/benchmarks/
COPY LICENSE /src/
RUN cmake -S /src -B /build -G Ninja -DCMAKE_BUILD_TYPE=Release "-DCMAKE_CXX_FLAGS_RELEASE=-O2 -DNDEBUG" \
       -DTorch_DIR=/opt/libtorch/share/cmake/Torch -DTESSERA_BUILD_TESTS=OFF -DTESSERA_BUILD_EXAMPLES=OFF \
    && cmake --build /build \
    && cmake --install /build --component tessera --prefix /opt/tessera

FROM libtorch AS development
COPY --from=build /opt/tessera /usr/local/
ENV Torch_DIR=/opt/libtorch/share/cmake/Torch
WORKDIR /work
CMD ["bash"]

# Libraries and tool alone. For `tessera run --hosts` install openmpi-bin in an image made of this one.
FROM debian:12-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends libstdc++6 python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 tessera
COPY --from=libtorch /opt/libtorch/lib /opt/libtorch/lib/
COPY --from=build /opt/tessera/bin /opt/tessera/bin/
COPY --from=build /opt/tessera/lib /opt/tessera/lib/
COPY --from=build /opt/tessera/share/doc /opt/tessera/share/doc/
ENV PATH=/opt/tessera/bin:$PATH
USER 1000
WORKDIR /home/tessera
ENTRYPOINT ["tessera"]
CMD ["--help"]
