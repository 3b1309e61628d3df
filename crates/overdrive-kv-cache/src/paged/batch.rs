use overdrive_attention::{
    AttentionOptions, PagedLayout, PagedSlots, Window, attention_paged, paged_write,
};
use tch::Tensor;

use super::cache::{PagedCache, to_i64};
use super::ledger::{Prepared, SequenceId};
use crate::{AttendOptions, Error, KvCache, KvView, Result};

/// How this cache is called in errors.
const NAME: &str = "a batch of a paged cache";

/// A step of a model with new tokens of several texts of a [`PagedCache`], all in one row.
///
/// The model is given [`input_ids`](PagedBatch::input_ids) and
/// [`position_ids`](PagedBatch::position_ids) `(1, N)` and this as its cache; each text sees its own
/// tokens only, without padding and without a mask. The logits of
/// [`last_places`](PagedBatch::last_places) are those of the texts' next tokens.
///
/// Each layer attends once; [`truncate(0)`](KvCache::truncate) starts the step again. Nothing has
/// happened to the texts until [`commit`](PagedBatch::commit): a batch that is dropped, because the
/// model failed or was interrupted, leaves the cache as it was.
#[derive(Debug)]
pub struct PagedBatch<'a> {
    cache: &'a mut PagedCache,
    prepared: Vec<Prepared>,
    slots: PagedSlots,
    tables: Vec<Vec<u32>>,
    query_lengths: Vec<usize>,
    key_lengths: Vec<usize>,
    /// Whether each layer has the new tokens.
    written: Vec<bool>,
}

impl<'a> PagedBatch<'a> {
    pub(super) fn new(
        cache: &'a mut PagedCache,
        prepared: Vec<Prepared>,
        slots: PagedSlots,
    ) -> PagedBatch<'a> {
        let lengths = |of: fn(&Prepared) -> usize| prepared.iter().map(of).collect();
        PagedBatch {
            tables: prepared.iter().map(|part| part.table.clone()).collect(),
            query_lengths: lengths(|part| part.tokens.len()),
            key_lengths: lengths(|part| part.past + part.tokens.len()),
            written: vec![false; cache.layers()],
            cache,
            prepared,
            slots,
        }
    }

    /// The new tokens count from now on.
    ///
    /// # Errors
    /// [`Error::StepNotRun`] if a layer has not been given them; the step is undone then.
    pub fn commit(mut self) -> Result<()> {
        if let Some(layer) = self.written.iter().position(|written| !written) {
            return Err(Error::StepNotRun { layer });
        }
        let prepared = std::mem::take(&mut self.prepared);
        self.cache.ledger().commit(prepared);
        Ok(())
    }

    /// New tokens of all texts together.
    pub fn tokens(&self) -> usize {
        self.slots.len()
    }

    /// The texts, in order.
    pub fn sequences(&self) -> impl Iterator<Item = SequenceId> {
        self.prepared.iter().map(|part| part.id)
    }

    /// The new tokens of all texts in one row: i64 `(1, N)` on the device of the cache.
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn input_ids(&self) -> Result<Tensor> {
        let tokens = self.prepared.iter().flat_map(|part| &part.tokens);
        self.row(tokens.copied().collect())
    }

    /// The place of each new token in its text: i64 `(1, N)`.
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn position_ids(&self) -> Result<Tensor> {
        let places = |part: &Prepared| part.past..part.past + part.tokens.len();
        let places = self.prepared.iter().flat_map(places);
        self.row(places.map(to_i64).collect())
    }

    /// Where in the row the last new token of each text is; none for a text without new tokens.
    pub fn last_places(&self) -> Vec<i64> {
        let ends = self.query_lengths.iter().scan(0, |end, length| {
            *end += *length;
            Some((*length, *end))
        });
        ends.filter(|(length, _)| *length > 0)
            .map(|(_, end)| to_i64(end - 1))
            .collect()
    }

    fn row(&self, numbers: Vec<i64>) -> Result<Tensor> {
        let row = Tensor::f_from_slice(&numbers)?.f_unsqueeze(0)?;
        Ok(row.f_to_device(self.cache.device())?)
    }

    /// Writes the new keys and values `(1, H_kv, N, D)` of a layer to their blocks.
    fn write(&mut self, layer: usize, keys: &Tensor, values: &Tensor) -> Result<()> {
        let layers = self.written.len();
        match self.written.get(layer) {
            None => return Err(Error::NoSuchLayer { layer, layers }),
            Some(true) => return Err(Error::LayerTwice { layer }),
            Some(false) => {}
        }
        self.check(layer, keys, values)?;
        let pool = &mut self.cache.pools()[layer];
        for (rows, pool) in [(keys, &mut pool.keys), (values, &mut pool.values)] {
            let rows = rows.f_squeeze_dim(0)?.f_transpose(0, 1)?;
            paged_write(&rows, pool, &self.slots)?;
        }
        self.written[layer] = true;
        Ok(())
    }

    fn check(&mut self, layer: usize, keys: &Tensor, values: &Tensor) -> Result<()> {
        let (k, v) = (keys.size(), values.size());
        if k.len() != 4 || v.len() != 4 || k[..3] != v[..3] {
            return Err(Error::BadShape { keys: k, values: v });
        }
        let expected = to_i64(self.tokens());
        if (k[0], k[2]) != (1, expected) {
            return Err(Error::NotOneRow {
                got: k,
                tokens: expected,
            });
        }
        if keys.requires_grad() || values.requires_grad() {
            return Err(Error::RequiresGrad { layer });
        }
        let pool = &self.cache.pools()[layer];
        for (held, got) in [(&pool.keys, keys), (&pool.values, values)] {
            let row = |size: Vec<i64>| vec![1, size[1], size[3]];
            let (held_shape, got_shape) = (row(held.size()), row(got.size()));
            let (kind, device) = (held.kind(), held.device());
            if held_shape != got_shape || kind != got.kind() || device != got.device() {
                return Err(Error::Mismatch {
                    layer,
                    held: kind,
                    held_shape,
                    held_device: device,
                    got: got.kind(),
                    got_shape,
                    got_device: got.device(),
                });
            }
        }
        Ok(())
    }
}

impl KvCache for PagedBatch<'_> {
    /// Always [`Error::NotDense`].
    fn append(&mut self, _: usize, _: &Tensor, _: &Tensor) -> Result<KvView> {
        Err(Error::NotDense { cache: NAME })
    }

    /// Query `(1, H, N, D)`, keys and values `(1, H_kv, N, D)` of the new tokens of all texts; each text
    /// attends to its own tokens.
    fn attend(
        &mut self,
        layer: usize,
        query: &Tensor,
        keys: &Tensor,
        values: &Tensor,
        options: &AttendOptions<'_>,
    ) -> Result<Tensor> {
        if options.mask.is_some() {
            return Err(Error::Unsupported {
                cache: NAME,
                what: "take a mask",
                hint: "its texts are kept apart without one; give the model no attention mask",
            });
        }
        let window = match options.window {
            Some(size) => Window::sliding(usize::try_from(size).unwrap_or(0)),
            None => Window::default(),
        };
        let options = AttentionOptions {
            causal: true,
            window,
            scale: options.scale,
            softcap: options.softcap,
            backend: options.backend,
            ..AttentionOptions::default()
        };
        self.write(layer, keys, values)?;
        let pool = &self.cache.pools()[layer];
        let layout = PagedLayout {
            block_tables: &self.tables,
            query_lengths: &self.query_lengths,
            key_lengths: &self.key_lengths,
        };
        let rows = query.f_squeeze_dim(0)?.f_transpose(0, 1)?;
        let (output, _) = attention_paged(&rows, &pool.keys, &pool.values, &layout, &options)?;
        Ok(output.f_transpose(0, 1)?.f_unsqueeze(0)?)
    }

    fn layers(&self) -> usize {
        self.written.len()
    }

    /// 0: there is no one number of past tokens. Positions are those of
    /// [`position_ids`](PagedBatch::position_ids).
    fn len(&self) -> i64 {
        0
    }

    /// Starts the step again for `len` 0, which is the only length there is.
    fn truncate(&mut self, len: i64) -> Result<()> {
        match len {
            0 => {
                self.written.fill(false);
                Ok(())
            }
            len if len < 0 => Err(Error::NegativeLength { len }),
            len => Err(Error::TruncateBeyondEnd { len, held: 0 }),
        }
    }

    /// Starts the step again; [`PagedCache::release`] forgets a text.
    fn reset(&mut self) {
        self.written.fill(false);
    }

    fn reorder(&mut self, _: &Tensor) -> Result<()> {
        Err(Error::Unsupported {
            cache: NAME,
            what: "reorder rows",
            hint: "between steps, fork and release texts of the PagedCache",
        })
    }

    fn fork(&self) -> Result<Box<dyn KvCache>> {
        Err(Error::Unsupported {
            cache: NAME,
            what: "be forked",
            hint: "between steps, fork texts of the PagedCache",
        })
    }

    fn bytes(&self) -> u64 {
        self.cache.bytes()
    }

    fn bytes_per_token(&self) -> f64 {
        self.cache.bytes_per_token()
    }

    fn state(&self) -> Result<Vec<(String, Tensor)>> {
        Err(Error::Unsupported {
            cache: NAME,
            what: "be saved",
            hint: "keep the token ids and run them again, or save a cache of one text",
        })
    }

    fn load_state(&mut self, _: &[(String, Tensor)]) -> Result<()> {
        Err(Error::Unsupported {
            cache: NAME,
            what: "be loaded",
            hint: "keep the token ids and run them again, or load a cache of one text",
        })
    }
}

impl Drop for PagedBatch<'_> {
    fn drop(&mut self) {
        let prepared = std::mem::take(&mut self.prepared);
        self.cache.ledger().cancel(prepared);
    }
}
