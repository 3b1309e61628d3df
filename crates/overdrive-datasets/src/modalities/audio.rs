//! The decoding of audio files: WAV, FLAC, MP3 and Ogg Vorbis.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use symphonia::core::codecs::audio::{AudioCodecParameters, AudioDecoderOptions};
use symphonia::core::errors::Error as DecodeError;
use symphonia::core::formats::probe::Hint;
use symphonia::core::formats::{FormatOptions, FormatReader, TrackType};
use symphonia::core::io::{MediaSource, MediaSourceStream};
use symphonia::core::meta::MetadataOptions;

use overdrive_core::Error as CommonError;

use crate::read_failure::{NotedReader, ReadFailure, is_of_path};
use crate::{Error, Result};

type Outcome<T> = std::result::Result<T, String>;

/// The tolerance of the bound on the duration. Clips are selected by the duration in the manifest, which is
/// rounded, often to tenths of a second.
const ROUNDING_S: f64 = 0.1;

/// Audio of one channel.
#[derive(Debug, PartialEq)]
pub(super) struct Mono {
    /// The samples, from -1 to 1.
    pub(super) samples: Vec<f32>,
    pub(super) rate: u32,
}

/// The excerpt of a file that is decoded.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Excerpt {
    /// The time before it, in seconds.
    pub(super) offset_s: f64,
    /// Its duration in seconds; `None` for the rest of the file.
    pub(super) duration_s: Option<f64>,
    /// The longest duration that is allowed, in seconds; an excerpt that is longer by more than [`ROUNDING_S`] is an
    /// error before all is decoded.
    pub(super) max_s: Option<f64>,
}

/// Decodes an excerpt of the file at `path`, and mixes the channels by their mean.
///
/// # Errors
/// [`Error::Other`] with the problem of the file or of its path, which is an error about the record that names it, and
/// other errors if the disk cannot read it.
pub(super) fn decode(path: &Path, excerpt: &Excerpt) -> Result<Mono> {
    let failure = ReadFailure::default();
    let open = || AudioFile::new(path, &failure)?.decode(excerpt);
    // A decoder may panic on damaged input, which becomes an error of this file.
    let decoded = catch_unwind(AssertUnwindSafe(open)).unwrap_or_else(|_| {
        Err("its decoder panicked; the message is on standard error".to_owned())
    });
    let problem = match (failure.take(), decoded) {
        (Some(error), _) if !is_of_path(&error) => {
            return Err(CommonError::io("read", path)(error).into());
        }
        (Some(error), _) => error.to_string(),
        (None, Err(problem)) => problem,
        (None, Ok(sound)) => return Ok(sound),
    };
    let problem = format!("the audio file {}: {problem}", path.display());
    Err(Error::other(problem))
}

/// Returns the duration of the file by its header in seconds; `None` if the header does not have it, or
/// cannot be read.
pub(super) fn duration_s(path: &Path) -> Option<f64> {
    let read_header = || -> Outcome<_> {
        let opened = AudioFile::new(path, &ReadFailure::default())?;
        let rate = opened.parameters.sample_rate;
        let seconds = |(frames, rate): (u64, u32)| frames as f64 / f64::from(rate);
        Ok(opened.frames.zip(rate).map(seconds))
    };
    // A file without a usable header is not an error here: decoding it reports the reason.
    catch_unwind(AssertUnwindSafe(read_header)).ok()?.ok()?
}

impl MediaSource for NotedReader<File> {
    fn is_seekable(&self) -> bool {
        self.reader.is_seekable()
    }

    fn byte_len(&self) -> Option<u64> {
        self.reader.byte_len()
    }
}

struct AudioFile {
    format: Box<dyn FormatReader>,
    parameters: AudioCodecParameters,
    track: u32,
    /// The number of frames (samples per channel) in the header.
    frames: Option<u64>,
}

impl AudioFile {
    fn new(path: &Path, failure: &ReadFailure) -> Outcome<Self> {
        let failed = |error| failure.note(error).to_string();
        let file = NotedReader {
            reader: File::open(path).map_err(failed)?,
            failure: failure.clone(),
        };
        let stream = MediaSourceStream::new(Box::new(file), Default::default());
        let mut hint = Hint::new();
        if let Some(extension) = path.extension().and_then(|extension| extension.to_str()) {
            hint.with_extension(extension);
        }
        let format = symphonia::default::get_probe()
            .probe(&hint, stream, FormatOptions::default(), MetadataOptions::default())
            .map_err(|error| match error {
                DecodeError::IoError(_) | DecodeError::Unsupported(_) => format!(
                    "it is not WAV, FLAC, MP3 or Ogg Vorbis ({error}); convert it, for example with ffmpeg"
                ),
                error => error.to_string(),
            })?;
        let track = format
            .default_track(TrackType::Audio)
            .ok_or("it has no audio that can be decoded")?;
        let parameters = track
            .codec_params
            .as_ref()
            .and_then(|parameters| parameters.audio())
            .ok_or("its header does not name the codec")?
            .clone();
        let (id, frames) = (track.id, track.num_frames);
        Ok(Self {
            format,
            parameters,
            track: id,
            frames,
        })
    }

    fn decode(mut self, excerpt: &Excerpt) -> Outcome<Mono> {
        // Everything before the excerpt is decoded and dropped: seeking is not exact in all formats.
        let mut decoder = symphonia::default::get_codecs()
            .make_audio_decoder(&self.parameters, &AudioDecoderOptions::default())
            .map_err(|error| error.to_string())?;
        let mut sound = MonoBuffer::default();
        let mut interleaved: Vec<f32> = Vec::new();
        while let Some(packet) = self
            .format
            .next_packet()
            .map_err(|error| sound.broken(&error))?
        {
            if packet.track_id != self.track {
                continue;
            }
            let buffer = decoder
                .decode(&packet)
                .map_err(|error| sound.broken(&error))?;
            let (rate, channels) = (buffer.spec().rate(), buffer.spec().channels().count());
            buffer.copy_to_vec_interleaved(&mut interleaved);
            sound.add(&interleaved, channels, rate, excerpt)?;
            if sound.is_complete() {
                return sound.finish(excerpt);
            }
        }
        // The headers of lossless formats have the exact length.
        match self.frames {
            Some(frames) if sound.frames < frames && !self.is_lossy() => Err(format!(
                "only {} of {frames} samples can be decoded: it was truncated or is damaged",
                sound.frames
            )),
            _ => sound.finish(excerpt),
        }
    }

    fn is_lossy(&self) -> bool {
        use symphonia::core::codecs::audio::well_known::{CODEC_ID_MP3, CODEC_ID_VORBIS};
        [CODEC_ID_MP3, CODEC_ID_VORBIS].contains(&self.parameters.codec)
    }
}

/// The samples that have been decoded so far.
#[derive(Default)]
struct MonoBuffer {
    samples: Vec<f32>,
    rate: u32,
    /// The number of decoded frames, including those before the excerpt.
    frames: u64,
    /// The range of the excerpt's frames, once the rate is known.
    wanted: std::ops::Range<u64>,
}

impl MonoBuffer {
    fn add(
        &mut self,
        interleaved: &[f32],
        channels: usize,
        rate: u32,
        excerpt: &Excerpt,
    ) -> Outcome<()> {
        if self.rate == 0 {
            // Any other rate means a damaged header, with which resampling could produce audio of any length.
            if !(1_000..=768_000).contains(&rate) {
                return Err(format!("its header has a rate of {rate} Hz"));
            }
            self.rate = rate;
            let frames = |seconds: f64| (seconds * f64::from(rate)).round() as u64;
            let start = frames(excerpt.offset_s);
            let end = excerpt
                .duration_s
                .map(|length| start.saturating_add(frames(length)));
            self.wanted = start..end.unwrap_or(u64::MAX);
        } else if self.rate != rate {
            return Err(format!(
                "its rate changes from {} Hz to {rate} Hz",
                self.rate
            ));
        }
        let channels = channels.max(1);
        for frame in interleaved.chunks_exact(channels) {
            if self.wanted.contains(&self.frames) {
                self.samples
                    .push(frame.iter().sum::<f32>() / channels as f32);
            }
            self.frames += 1;
        }
        let too_long = excerpt
            .max_s
            .filter(|&max_s| self.seconds() > max_s + ROUNDING_S);
        match too_long {
            Some(max_s) => Err(format!("it is longer than `max_duration`, {max_s} s")),
            None => Ok(()),
        }
    }

    fn seconds(&self) -> f64 {
        self.samples.len() as f64 / f64::from(self.rate.max(1))
    }

    fn is_complete(&self) -> bool {
        self.rate > 0 && self.frames >= self.wanted.end
    }

    fn finish(self, excerpt: &Excerpt) -> Outcome<Mono> {
        if self.samples.is_empty() {
            return Err(match excerpt.offset_s > 0.0 {
                true => format!("there is no audio after {} s", excerpt.offset_s),
                false => "it has no audio".to_owned(),
            });
        }
        Ok(Mono {
            samples: self.samples,
            rate: self.rate,
        })
    }

    fn broken(&self, error: &DecodeError) -> String {
        format!(
            "{error}, after {:.3} s",
            self.frames as f64 / f64::from(self.rate.max(1))
        )
    }
}
