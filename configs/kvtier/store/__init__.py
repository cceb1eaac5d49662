"""What ``kvtier store`` says: options, words and tables. What it does lies in ``lmcache_nvme_backend.store``."""
