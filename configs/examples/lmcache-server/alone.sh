# LMCache's server. Its 5 GiB of host memory hold the longest hit, 8192 tokens, beside the
# model's own; the tier itself needs none but the staging of a store behind.
LMCACHE_TRACK_USAGE=false lmcache server --host 127.0.0.1 --port 5555 --l1-size-gb 5 --eviction-policy LRU --l2-adapter '{"type":"plugin","module_path":"lmcache_nvme_backend","class_name":"NvmeL2Adapter","adapter_params":{"root_dir":"/var/lib/kv-cache","quota_gib":32}}' --supported-transfer-mode auto
# vLLM, once the server answers. kvtier.identity proves to the server whose KV it is.
VLLM_CPU_KVCACHE_SPACE=5 PYTHONHASHSEED=0 python -m vllm.entrypoints.openai.api_server --model meta-llama/Llama-2-7b-hf --max-model-len 8192 --enable-prefix-caching --kv-transfer-config '{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute","kv_connector_extra_config":{"lmcache.mp.host":"tcp://127.0.0.1","lmcache.mp.port":5555,"kvtier.identity":"auto"}}'
