//! Batches of spectrograms with transcripts.

use tch::Tensor;

use overdrive_core::{IGNORE_INDEX, check_option};

use super::device_loader::on_device_by_map;
use super::seq2seq::{mask_of, padded_rows};
use crate::Result;

/// A spectrogram and the tokens of its transcript.
#[derive(Debug)]
pub struct SpeechExample {
    /// The frames, (frames, features), Float: [`LogMel::frames`](crate::LogMel::frames).
    pub frames: Tensor,
    /// The tokens of the transcript.
    pub labels: Vec<i64>,
}

/// Spectrograms with transcripts as tensors, made by [`collate_speech`]. B is the number of clips, T the number of frames
/// of the longest.
#[derive(Debug)]
#[non_exhaustive]
pub struct SpeechBatch {
    /// The frames, (B, T, features), Float, padded at the end with zeros.
    pub input_features: Tensor,
    /// The attention mask, (B, T), Int64: 1 for a frame, 0 for padding. `None` if no clip is padded.
    pub attention_mask: Option<Tensor>,
    /// The number of frames of each clip.
    pub lengths: Vec<i64>,
    /// The tokens of the transcripts, (B, longest), Int64, padded with [`IGNORE_INDEX`].
    pub labels: Tensor,
}

impl SpeechBatch {
    /// Returns the fraction of the frames that are padding, 0 to 1.
    pub fn padding(&self) -> f64 {
        let (used, size) = (self.lengths.iter().sum::<i64>(), self.input_features.size());
        1.0 - used as f64 / (size[0] * size[1]).max(1) as f64
    }

    fn map_tensors(self, change: impl Fn(Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self {
            input_features: change(self.input_features)?,
            attention_mask: self.attention_mask.map(&change).transpose()?,
            labels: change(self.labels)?,
            ..self
        })
    }
}

on_device_by_map!(SpeechBatch);

/// Collates spectrograms into a batch: each is padded to the longest.
///
/// ```
/// use overdrive_datasets::{SpeechExample, collate_speech};
/// use tch::{Device, Kind, Tensor};
///
/// let clip = |frames: i64, labels: &[i64]| SpeechExample {
///     frames: Tensor::ones([frames, 80], (Kind::Float, Device::Cpu)),
///     labels: labels.to_vec(),
/// };
/// let batch = collate_speech(&[clip(30, &[7, 8, 9]), clip(50, &[7])])?;
/// assert_eq!(batch.input_features.size(), [2, 50, 80]);
/// assert_eq!(batch.lengths, [30, 50]);
/// assert_eq!(batch.labels, Tensor::from_slice2(&[[7_i64, 8, 9], [7, -100, -100]]));
/// assert!((batch.padding() - 0.2).abs() < 1e-9);
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
///
/// # Errors
/// [`Error::Common`](crate::Error::Common) if there is no clip, or the frames of one are not (frames, features) with the
/// features of the others; an error of libtorch if there is no memory for the tensors.
pub fn collate_speech(rows: &[SpeechExample]) -> Result<SpeechBatch> {
    check_option(!rows.is_empty(), "rows", "empty", "at least one clip")?;
    let features = rows[0].frames.size().get(1).copied().unwrap_or(0);
    for (number, row) in rows.iter().enumerate() {
        let size = row.frames.size();
        check_option(
            matches!(size.as_slice(), [frames, other] if *frames > 0 && *other == features),
            "frames",
            format!("{size:?} (row {number})"),
            format!("(frames, {features}), as in the first row"),
        )?;
    }
    let lengths: Vec<i64> = rows.iter().map(|row| row.frames.size()[0]).collect();
    let frames: Vec<&Tensor> = rows.iter().map(|row| &row.frames).collect();
    let labels: Vec<&[i64]> = rows.iter().map(|row| row.labels.as_slice()).collect();
    Ok(SpeechBatch {
        input_features: Tensor::f_pad_sequence(&frames, true, 0.0, "right")?,
        attention_mask: mask_of(lengths.iter().map(|&length| length as usize), 1)?,
        labels: padded_rows(&labels, IGNORE_INDEX, 1)?,
        lengths,
    })
}
