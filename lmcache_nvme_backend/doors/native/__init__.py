"""vLLM's own offloading connector over the chunk store, with no CPU tier between.

The scheduler's side looks up, pins and admits (`manager`); the workers' side moves bytes between the device's blocks, a
small staging ring and the drive (`worker`), in threads of its own, so that no engine step waits for a transfer.
`connector` ties both to vLLM and reports a load that fails the way vLLM can live with.
"""
