//! Files of sound: WAV, FLAC, MP3 and Ogg Vorbis.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use symphonia::core::codecs::audio::{AudioCodecParameters, AudioDecoderOptions};
use symphonia::core::errors::Error;
use symphonia::core::formats::probe::Hint;
use symphonia::core::formats::{FormatOptions, FormatReader, TrackType};
use symphonia::core::io::MediaSourceStream;
use symphonia::core::meta::MetadataOptions;

type Outcome<T> = std::result::Result<T, String>;

/// Sound in one channel.
#[derive(Debug, PartialEq)]
pub(super) struct Mono {
    /// From -1 to 1.
    pub(super) samples: Vec<f32>,
    pub(super) rate: u32,
}

/// Which part of a file is read.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Part {
    /// Seconds in front of it.
    pub(super) offset_s: f64,
    /// Its length; `None`: all that follows.
    pub(super) duration_s: Option<f64>,
    /// Longer sound is an error, noticed before it is all decoded.
    pub(super) max_s: Option<f64>,
}

/// The part of the file at `path`, its channels mixed by their mean.
pub(super) fn decode(path: &Path, part: &Part) -> Outcome<Mono> {
    // Decoders are many and their input is anything; a panic of one is an error of this file.
    catch_unwind(AssertUnwindSafe(|| Opened::new(path)?.decode(part))).unwrap_or_else(|_| {
        Err("its decoder panicked; the message is on standard error".to_owned())
    })
}

/// How many seconds the file says it has, without decoding; `None`: it does not say.
pub(super) fn duration_s(path: &Path) -> Outcome<Option<f64>> {
    let look = || {
        let opened = Opened::new(path)?;
        let rate = opened.parameters.sample_rate;
        let seconds = |(frames, rate): (u64, u32)| frames as f64 / f64::from(rate);
        Ok(opened.frames.zip(rate).map(seconds))
    };
    catch_unwind(AssertUnwindSafe(look)).unwrap_or(Ok(None))
}

struct Opened {
    format: Box<dyn FormatReader>,
    parameters: AudioCodecParameters,
    track: u32,
    /// Frames (samples of each channel) that the file says it has.
    frames: Option<u64>,
}

impl Opened {
    fn new(path: &Path) -> Outcome<Self> {
        let file = File::open(path).map_err(|error| error.to_string())?;
        let stream = MediaSourceStream::new(Box::new(file), Default::default());
        let mut hint = Hint::new();
        if let Some(extension) = path.extension().and_then(|extension| extension.to_str()) {
            hint.with_extension(extension);
        }
        let format = symphonia::default::get_probe()
            .probe(&hint, stream, FormatOptions::default(), MetadataOptions::default())
            .map_err(|error| match error {
                Error::IoError(_) | Error::Unsupported(_) => format!(
                    "it is no WAV, FLAC, MP3 or Ogg Vorbis ({error}); convert it, for example with ffmpeg"
                ),
                error => error.to_string(),
            })?;
        let track = format
            .default_track(TrackType::Audio)
            .ok_or("there is no sound in it that can be decoded")?;
        let parameters = track
            .codec_params
            .as_ref()
            .and_then(|parameters| parameters.audio())
            .ok_or("it does not say how its sound is coded")?
            .clone();
        let (id, frames) = (track.id, track.num_frames);
        Ok(Self {
            format,
            parameters,
            track: id,
            frames,
        })
    }

    fn decode(mut self, part: &Part) -> Outcome<Mono> {
        // What is in the way of a part is decoded too, and dropped: that keeps it exact in all formats.
        let mut decoder = symphonia::default::get_codecs()
            .make_audio_decoder(&self.parameters, &AudioDecoderOptions::default())
            .map_err(|error| error.to_string())?;
        let mut sound = Mixed::default();
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
            sound.add(&interleaved, channels, rate, part)?;
            if sound.is_complete() {
                return sound.finish(part);
            }
        }
        // The formats without loss say exactly how much there is.
        match self.frames {
            Some(frames) if sound.frames < frames && !self.is_lossy() => Err(format!(
                "only {} of {frames} samples can be decoded: it was cut short or is damaged",
                sound.frames
            )),
            _ => sound.finish(part),
        }
    }

    fn is_lossy(&self) -> bool {
        use symphonia::core::codecs::audio::well_known::{CODEC_ID_MP3, CODEC_ID_VORBIS};
        [CODEC_ID_MP3, CODEC_ID_VORBIS].contains(&self.parameters.codec)
    }
}

/// What has been decoded so far.
#[derive(Default)]
struct Mixed {
    samples: Vec<f32>,
    rate: u32,
    /// Frames decoded, those in front of the part among them.
    frames: u64,
    /// The frames of the part, once the rate is known.
    wanted: std::ops::Range<u64>,
}

impl Mixed {
    fn add(&mut self, interleaved: &[f32], channels: usize, rate: u32, part: &Part) -> Outcome<()> {
        if self.rate == 0 {
            // Any other is a damaged header, and would make sound of any length.
            if !(1_000..=768_000).contains(&rate) {
                return Err(format!("it says that it has {rate} samples a second"));
            }
            self.rate = rate;
            let frames = |seconds: f64| (seconds * f64::from(rate)).round() as u64;
            let start = frames(part.offset_s);
            let end = part
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
        let too_long = part.max_s.filter(|&max_s| self.seconds() > max_s);
        match too_long {
            Some(max_s) => Err(format!("it is longer than max_duration, {max_s} s")),
            None => Ok(()),
        }
    }

    fn seconds(&self) -> f64 {
        self.samples.len() as f64 / f64::from(self.rate.max(1))
    }

    fn is_complete(&self) -> bool {
        self.rate > 0 && self.frames >= self.wanted.end
    }

    fn finish(self, part: &Part) -> Outcome<Mono> {
        if self.samples.is_empty() {
            return Err(match part.offset_s > 0.0 {
                true => format!("there is no sound behind {} s", part.offset_s),
                false => "there is no sound in it".to_owned(),
            });
        }
        Ok(Mono {
            samples: self.samples,
            rate: self.rate,
        })
    }

    fn broken(&self, error: &Error) -> String {
        format!(
            "{error}, after {:.3} s",
            self.frames as f64 / f64::from(self.rate.max(1))
        )
    }
}
