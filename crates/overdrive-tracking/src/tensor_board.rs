//! A tracker that writes TensorBoard event files.
//!
//! An event file is a sequence of TFRecords, each of one `tensorflow.Event` protocol buffer. The
//! messages below are the subset of `event.proto` and `summary.proto` that scalars and texts need,
//! with TensorFlow's field numbers. They are defined here because existing crates either panic when the disk is
//! full or need the protobuf compiler on the user's machine.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use overdrive_core::Error as CommonError;
use prost::Message;

use crate::append_file::AppendFile;
use crate::{Result, StepMetrics, Tracker};

/// A tracker that writes scalars and texts as TensorBoard events.
///
/// The tags are those of Hugging Face's trainer (`train/loss`, `train/learning_rate`, `eval/loss`;
/// see [`StepMetrics::scalars`]). `tensorboard --logdir DIR` shows them. Values are stored as
/// fp32, the precision of TensorBoard's scalar plugin. The events of each call reach the
/// operating system before it returns; events that did not fit on a full disk are written by the next
/// call that finds space.
#[derive(Debug)]
pub struct TensorBoard {
    file: AppendFile,
    path: PathBuf,
}

// Makes the file names unique if a process opens two writers within one second.
static WRITERS: AtomicU64 = AtomicU64::new(0);

impl TensorBoard {
    /// Creates an event file in `folder`, which is created if it is missing. Files of earlier runs
    /// are kept; TensorBoard shows them together.
    ///
    /// # Errors
    /// [`overdrive_core::Error::Io`].
    pub fn create(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        fs::create_dir_all(folder).map_err(CommonError::io("create the folder", folder))?;
        let (file, path) = new_file(folder, wall_time() as u64)?;
        let mut writer = Self {
            file: AppendFile::new(file),
            path,
        };
        // TensorBoard rejects files that do not begin with this version.
        writer.write(0, None, Some("brain.Event:2".to_owned()))?;
        Ok(writer)
    }

    /// Returns the path of the event file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn write(
        &mut self,
        step: u64,
        summary: Option<Summary>,
        file_version: Option<String>,
    ) -> Result<()> {
        let step = i64::try_from(step).unwrap_or(i64::MAX);
        let event = Event {
            wall_time: wall_time(),
            step,
            file_version,
            summary,
        };
        let mut record = Vec::new();
        write_record(&mut record, &event.encode_to_vec())
            .and_then(|()| self.file.append(&record))
            .map_err(CommonError::io("append to", &self.path))?;
        Ok(())
    }
}

impl Tracker for TensorBoard {
    fn log(&mut self, metrics: &StepMetrics) -> Result<()> {
        let value = metrics
            .scalars()
            .into_iter()
            .map(|(tag, value)| SummaryValue {
                tag,
                simple_value: Some(value as f32),
                ..SummaryValue::default()
            })
            .collect();
        self.write(metrics.step, Some(Summary { value }), None)
    }

    fn log_text(&mut self, step: u64, tag: &str, text: &str) -> Result<()> {
        let value = SummaryValue {
            // TensorFlow 2's suffix, which the text plugin uses to find its series.
            tag: format!("{tag}/text_summary"),
            metadata: Some(SummaryMetadata {
                plugin_data: Some(PluginData {
                    plugin_name: "text".to_owned(),
                }),
            }),
            tensor: Some(TensorProto {
                dtype: DT_STRING,
                tensor_shape: Some(TensorShape {
                    dim: vec![Dim { size: 1 }],
                }),
                string_val: vec![text.as_bytes().to_vec()],
            }),
            ..SummaryValue::default()
        };
        self.write(step, Some(Summary { value: vec![value] }), None)
    }

    fn finish(&mut self) -> Result<()> {
        self.file
            .sync()
            .map_err(CommonError::io("sync", &self.path))?;
        Ok(())
    }
}

/// Creates an event file for the time `seconds`.
fn new_file(folder: &Path, seconds: u64) -> Result<(File, PathBuf)> {
    let process = std::process::id();
    loop {
        let serial = WRITERS.fetch_add(1, Ordering::Relaxed);
        // TensorBoard looks for `tfevents` in the name and orders the files by the time after it.
        let name = format!("events.out.tfevents.{seconds:010}.overdrive.{process}.{serial}");
        let path = folder.join(name);
        match File::create_new(&path) {
            Ok(file) => return Ok((file, path)),
            // A container that restarts within the second has the same process id.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(source) => return Err(CommonError::io("create", path)(source).into()),
        }
    }
}

/// Returns the seconds since 1970.
fn wall_time() -> f64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0.0, |since| since.as_secs_f64())
}

/// Writes one TFRecord: length, its checksum, data, its checksum; all little-endian.
fn write_record(out: &mut impl Write, data: &[u8]) -> std::io::Result<()> {
    let length = (data.len() as u64).to_le_bytes();
    out.write_all(&length)?;
    out.write_all(&masked_crc(&length).to_le_bytes())?;
    out.write_all(data)?;
    out.write_all(&masked_crc(data).to_le_bytes())
}

/// Returns the CRC-32C, rotated and offset so that it stays a good checksum of data that contains checksums
/// (TensorFlow's `tsl/lib/hash/crc32c.h`).
fn masked_crc(data: &[u8]) -> u32 {
    crc32c::crc32c(data)
        .rotate_right(15)
        .wrapping_add(0xa282_ead8)
}

/// `DataType.DT_STRING` of `types.proto`.
const DT_STRING: i32 = 7;

#[derive(Clone, PartialEq, Message)]
struct Event {
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<SummaryValue>,
}

#[derive(Clone, PartialEq, Message)]
struct SummaryValue {
    #[prost(string, tag = "1")]
    tag: String,
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
    #[prost(message, optional, tag = "8")]
    tensor: Option<TensorProto>,
    #[prost(message, optional, tag = "9")]
    metadata: Option<SummaryMetadata>,
}

#[derive(Clone, PartialEq, Message)]
struct SummaryMetadata {
    #[prost(message, optional, tag = "1")]
    plugin_data: Option<PluginData>,
}

#[derive(Clone, PartialEq, Message)]
struct PluginData {
    #[prost(string, tag = "1")]
    plugin_name: String,
}

#[derive(Clone, PartialEq, Message)]
struct TensorProto {
    #[prost(int32, tag = "1")]
    dtype: i32,
    #[prost(message, optional, tag = "2")]
    tensor_shape: Option<TensorShape>,
    #[prost(bytes = "vec", repeated, tag = "8")]
    string_val: Vec<Vec<u8>>,
}

#[derive(Clone, PartialEq, Message)]
struct TensorShape {
    #[prost(message, repeated, tag = "2")]
    dim: Vec<Dim>,
}

#[derive(Clone, PartialEq, Message)]
struct Dim {
    #[prost(int64, tag = "1")]
    size: i64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_masked_checksum_is_tensorflows() {
        // From `tensorboard.compat.tensorflow_stub.pywrap_tensorflow.masked_crc32c`, tensorboard 2.21.
        assert_eq!(masked_crc(b""), 0xa282_ead8);
        assert_eq!(masked_crc(b"123456789"), 0xc78a_b0e5);
    }

    #[test]
    fn a_record_is_framed_by_its_length_and_two_checksums() {
        let mut bytes = Vec::new();
        write_record(&mut bytes, b"123456789").expect("writing to memory");
        assert_eq!(bytes.len(), 8 + 4 + 9 + 4);
        assert_eq!(bytes[..8], 9_u64.to_le_bytes());
        assert_eq!(bytes[12..21], *b"123456789");
        assert_eq!(bytes[21..], masked_crc(b"123456789").to_le_bytes());
    }

    #[test]
    fn the_events_of_a_file_decode_again() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let mut board = TensorBoard::create(folder.path()).expect("create");
        let metrics = StepMetrics {
            step: 7,
            loss: 1.5,
            eval_loss: Some(2.5),
            ..Default::default()
        };
        board.log(&metrics).expect("log");
        board
            .log_text(7, "sample", "fn main() {}")
            .expect("log_text");
        board.finish().expect("finish");

        let bytes = fs::read(board.path()).expect("read");
        let mut rest = bytes.as_slice();
        let mut events = Vec::new();
        while !rest.is_empty() {
            let length = u64::from_le_bytes(rest[..8].try_into().expect("8 bytes")) as usize;
            let data = &rest[12..12 + length];
            let checksum =
                u32::from_le_bytes(rest[12 + length..16 + length].try_into().expect("4"));
            assert_eq!(checksum, masked_crc(data));
            events.push(Event::decode(data).expect("an event"));
            rest = &rest[16 + length..];
        }
        assert_eq!(events.len(), 3);
        assert_eq!(events[0].file_version.as_deref(), Some("brain.Event:2"));
        let scalars = &events[1].summary.as_ref().expect("summary").value;
        let find = |tag: &str| scalars.iter().find(|value| value.tag == tag)?.simple_value;
        assert_eq!(events[1].step, 7);
        assert_eq!(find("train/loss"), Some(1.5));
        assert_eq!(find("eval/loss"), Some(2.5));
        assert_eq!(find("train/grad_norm"), None);
        let text = &events[2].summary.as_ref().expect("summary").value[0];
        assert_eq!(
            text.tensor.as_ref().expect("tensor").string_val,
            [b"fn main() {}".to_vec()]
        );
    }

    #[test]
    fn two_writers_of_one_second_get_their_own_files() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let first = TensorBoard::create(folder.path()).expect("first");
        let second = TensorBoard::create(folder.path()).expect("second");
        assert_ne!(first.path(), second.path());
    }

    #[test]
    fn a_file_of_another_process_with_the_same_id_is_kept() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let next = WRITERS.load(Ordering::Relaxed);
        let process = std::process::id();
        for serial in next..next + 50 {
            let name = format!("events.out.tfevents.0000000007.overdrive.{process}.{serial}");
            fs::write(folder.path().join(name), "theirs").expect("writes");
        }
        let (_file, path) = new_file(folder.path(), 7).expect("a free name");
        assert_eq!(fs::read(path).expect("reads"), b"");
        let files = fs::read_dir(folder.path()).expect("a folder");
        assert_eq!(files.count(), 51);
    }

    #[test]
    fn a_folder_that_is_a_file_is_an_error_with_its_path() {
        let file = tempfile::NamedTempFile::new().expect("temporary file");
        let error = TensorBoard::create(file.path()).expect_err("a file is in the way");
        assert!(
            error
                .to_string()
                .contains(&file.path().display().to_string()),
            "{error}"
        );
    }
}
