"""Documents in, token batches with labels out: readers, masks, packing, splits, and a deterministic order."""
