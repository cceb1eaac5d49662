vllm serve Qwen/Qwen3.8-27B-NVFP4 --kv-cache-dtype fp8 --enable-prefix-caching --kv-offloading-size 32 --kv-offloading-backend native
