use tch::Tensor;

/// The keys and values of a forward pass without a cache that later layers share, by the layers that computed them.
#[derive(Debug, Default)]
pub(crate) struct SharedKv(Vec<(usize, [Tensor; 2])>);

impl SharedKv {
    /// Returns the keys and values `(B, H, T, D)` of `layer`.
    pub(crate) fn of(&self, layer: usize) -> Option<[Tensor; 2]> {
        let held = self.0.iter().find(|(own, _)| *own == layer);
        held.map(|(_, pair)| pair.each_ref().map(Tensor::shallow_clone))
    }

    pub(crate) fn put(&mut self, layer: usize, keys: &Tensor, values: &Tensor) {
        // A recomputed block puts its keys and values again.
        self.0.retain(|(own, _)| *own != layer);
        let pair = [keys, values].map(Tensor::shallow_clone);
        self.0.push((layer, pair));
    }

    /// Returns handles of the same tensors.
    pub(crate) fn share(&self) -> SharedKv {
        let pairs = self.0.iter();
        SharedKv(
            pairs
                .map(|(layer, pair)| (*layer, pair.each_ref().map(Tensor::shallow_clone)))
                .collect(),
        )
    }
}
