//! Writing of GGUF files, tensor by tensor.

use std::collections::BTreeMap;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use overdrive_core::{Error as Common, files};
use tch::{Device, Kind, Tensor};
use tempfile::NamedTempFile;

use super::encode::{encode, is_writable};
use super::tensor_type::GgufType;
use super::value::{GgufArray, GgufValue};
use crate::codec::{run_jobs, units_of_job};
use crate::{Error, Result};

/// The alignment of tensors in bytes, the format's default.
const ALIGNMENT: usize = 32;
/// The version of the block formats, `general.quantization_version`.
const QUANTIZATION_VERSION: u32 = 2;

/// A tensor of a GGUF file that is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GgufTensorInfo {
    /// The name.
    pub name: String,
    /// The shape in libtorch's order: `(O, I)` for a linear layer.
    pub shape: Vec<i64>,
    /// The type of the elements.
    pub tensor_type: GgufType,
}

/// Writes a GGUF file, version 3, in little-endian byte order. The file gets its name when it is complete.
///
/// The header is written first, so all tensors are declared before the first of them is written; in memory is one at a
/// time. The elements are rounded as llama.cpp's reference quantizers round them.
///
/// ```
/// use overdrive_quantization::{GgufFile, GgufTensorInfo, GgufType, GgufValue, GgufWriter};
/// use tch::{Device, Kind, Tensor};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("one.gguf");
/// let metadata = [("general.architecture".to_owned(), GgufValue::String("llama".to_owned()))];
/// let weight = GgufTensorInfo {
///     name: "output.weight".to_owned(),
///     shape: vec![4, 64],
///     tensor_type: GgufType::Q8_0,
/// };
/// let mut writer = GgufWriter::create(&path, &metadata.into(), vec![weight])?;
/// writer.write(&Tensor::ones([4, 64], (Kind::Float, Device::Cpu)))?;
/// writer.finish()?;
///
/// let file = GgufFile::open(&path)?;
/// assert_eq!(file.tensor("output.weight").unwrap().tensor_type(), GgufType::Q8_0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct GgufWriter {
    path: PathBuf,
    file: BufWriter<NamedTempFile>,
    tensors: std::vec::IntoIter<GgufTensorInfo>,
    /// The tensor that is written, and the number of its elements that are missing.
    current: Option<(GgufTensorInfo, usize)>,
}

impl GgufWriter {
    /// Writes the header of a file with these metadata and tensors. `general.quantization_version` is added.
    ///
    /// # Errors
    /// [`Error::Common`] if the file cannot be written; [`Error::Values`] for a tensor of a type that cannot be written,
    /// or whose rows are no multiple of the type's block size.
    pub fn create(
        path: impl AsRef<Path>,
        metadata: &BTreeMap<String, GgufValue>,
        tensors: Vec<GgufTensorInfo>,
    ) -> Result<GgufWriter> {
        let path = path.as_ref();
        tensors.iter().try_for_each(check)?;
        let mut metadata = metadata.clone();
        metadata
            .entry("general.quantization_version".to_owned())
            .or_insert(GgufValue::U32(QUANTIZATION_VERSION));
        let mut header = b"GGUF".to_vec();
        header.extend(3u32.to_le_bytes());
        header.extend((tensors.len() as u64).to_le_bytes());
        header.extend((metadata.len() as u64).to_le_bytes());
        for (key, value) in &metadata {
            string(key, &mut header);
            header.extend(value.id().to_le_bytes());
            put(value, &mut header);
        }
        let mut offset = 0;
        for tensor in &tensors {
            string(&tensor.name, &mut header);
            header.extend((tensor.shape.len() as u32).to_le_bytes());
            let dimensions = tensor.shape.iter().rev();
            header.extend(dimensions.flat_map(|n| n.to_le_bytes()));
            header.extend(tensor.tensor_type.id().to_le_bytes());
            header.extend((offset as u64).to_le_bytes());
            offset += tensor.bytes().next_multiple_of(ALIGNMENT);
        }
        header.resize(header.len().next_multiple_of(ALIGNMENT), 0);
        let mut writer = GgufWriter {
            file: BufWriter::new(files::unfinished(path)?),
            path: path.to_owned(),
            tensors: tensors.into_iter(),
            current: None,
        };
        writer.put(&header)?;
        Ok(writer)
    }

    /// Writes the next tensor, or the next rows of its first dimension: a stack can be written matrix by matrix.
    ///
    /// # Errors
    /// [`Error::Values`] for elements that are not finite or too large for the type; [`Error::Common`] with `Internal` for
    /// elements beyond the declared ones, and with `Io` if the file cannot be written.
    pub fn write(&mut self, tensor: &Tensor) -> Result<()> {
        let mut numbers: Vec<f32> = Vec::new();
        let flat = tensor.f_to_device(Device::Cpu)?.f_to_kind(Kind::Float)?;
        numbers.resize(flat.numel(), 0.0);
        flat.f_contiguous()?
            .f_copy_data(&mut numbers, flat.numel())?;
        let next = self.current.take().or_else(|| {
            let info = self.tensors.next()?;
            let elements = info.elements();
            Some((info, elements))
        });
        let Some((info, missing)) = next else {
            return Err(Common::internal("more tensors than declared").into());
        };
        let width = info.width();
        if numbers.len() > missing || !numbers.len().is_multiple_of(width) {
            let given = numbers.len();
            let reason = format!(
                "{given} elements for the {missing} missing ones of `{}`",
                info.name
            );
            return Err(Common::internal(reason).into());
        }
        let largest = match info.tensor_type {
            GgufType::F32 | GgufType::BF16 => f32::MAX,
            // The scale of a block, too, is in fp16; it is smaller than its largest element.
            _ => half::f16::MAX.to_f32(),
        };
        if let Some(wrong) = numbers.iter().find(|x| x.is_nan() || x.abs() > largest) {
            let expected = format!(
                "finite and at most {largest:e} in `{}`, to be written as {}",
                info.name, info.tensor_type
            );
            return Err(Error::values("elements", wrong.to_string(), expected));
        }
        for part in encoded(info.tensor_type, &numbers, width) {
            self.put(&part)?;
        }
        let missing = missing - numbers.len();
        if missing > 0 {
            self.current = Some((info, missing));
            return Ok(());
        }
        let padding = info.bytes().next_multiple_of(ALIGNMENT) - info.bytes();
        self.put(&[0; ALIGNMENT][..padding])
    }

    /// Gives the complete file its name.
    ///
    /// # Errors
    /// [`Error::Common`] with `Internal` if a declared tensor is missing, and with `Io` if the file cannot be written.
    pub fn finish(mut self) -> Result<()> {
        let missing = self
            .current
            .take()
            .map(|(info, _)| info)
            .or_else(|| self.tensors.next());
        if let Some(info) = missing {
            return Err(Common::internal(format!("`{}` is incomplete", info.name)).into());
        }
        let file = self
            .file
            .into_inner()
            .map_err(|error| Common::io("write", &self.path)(error.into_error()))?;
        Ok(files::commit(file, &self.path)?)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(self
            .file
            .write_all(bytes)
            .map_err(Common::io("write", &self.path))?)
    }
}

impl GgufTensorInfo {
    fn elements(&self) -> usize {
        self.shape.iter().product::<i64>().unsigned_abs() as usize
    }

    fn width(&self) -> usize {
        self.shape.last().map_or(1, |&n| n.unsigned_abs() as usize)
    }

    fn bytes(&self) -> usize {
        self.elements() / self.tensor_type.block_size() * self.tensor_type.block_bytes()
    }
}

fn check(info: &GgufTensorInfo) -> Result<()> {
    let GgufTensorInfo {
        name,
        shape,
        tensor_type,
    } = info;
    if !is_writable(*tensor_type) {
        let expected = GgufType::names(is_writable);
        return Err(Error::values(
            "tensor_type",
            tensor_type.to_string(),
            format!("one of {expected} for `{name}`"),
        ));
    }
    if shape.iter().any(|&n| n < 1) || !info.width().is_multiple_of(tensor_type.block_size()) {
        let block = tensor_type.block_size();
        let expected = format!(
            "positive, with rows of a multiple of {block} elements, the block size of {tensor_type}, for `{name}`"
        );
        return Err(Error::values("shape", format!("{shape:?}"), expected));
    }
    Ok(())
}

/// Encodes rows of `width` elements on all threads, to parts that follow one another.
fn encoded(kind: GgufType, numbers: &[f32], width: usize) -> Vec<Vec<u8>> {
    let jobs = numbers.chunks(units_of_job(width) * width);
    let mut parts = vec![Vec::new(); jobs.len()];
    run_jobs(jobs.zip(&mut parts), |(rows, part)| {
        rows.chunks(width).for_each(|row| encode(kind, row, part));
    });
    parts
}

fn string(text: &str, out: &mut Vec<u8>) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// Appends a value without its type.
fn put(value: &GgufValue, out: &mut Vec<u8>) {
    match value {
        GgufValue::U8(n) => out.push(*n),
        GgufValue::I8(n) => out.extend(n.to_le_bytes()),
        GgufValue::U16(n) => out.extend(n.to_le_bytes()),
        GgufValue::I16(n) => out.extend(n.to_le_bytes()),
        GgufValue::U32(n) => out.extend(n.to_le_bytes()),
        GgufValue::I32(n) => out.extend(n.to_le_bytes()),
        GgufValue::F32(n) => out.extend(n.to_le_bytes()),
        GgufValue::Bool(flag) => out.push(u8::from(*flag)),
        GgufValue::String(text) => string(text, out),
        GgufValue::Array(array) => put_array(array, out),
        GgufValue::U64(n) => out.extend(n.to_le_bytes()),
        GgufValue::I64(n) => out.extend(n.to_le_bytes()),
        GgufValue::F64(n) => out.extend(n.to_le_bytes()),
    }
}

fn put_array(array: &GgufArray, out: &mut Vec<u8>) {
    let begin = |id: u32, count: usize, out: &mut Vec<u8>| {
        out.extend(id.to_le_bytes());
        out.extend((count as u64).to_le_bytes());
    };
    macro_rules! numbers {
        ($id:literal, $list:expr) => {{
            begin($id, $list.len(), out);
            out.extend($list.iter().flat_map(|n| n.to_le_bytes()));
        }};
    }
    match array {
        GgufArray::U8(list) => numbers!(0, list),
        GgufArray::I8(list) => numbers!(1, list),
        GgufArray::U16(list) => numbers!(2, list),
        GgufArray::I16(list) => numbers!(3, list),
        GgufArray::U32(list) => numbers!(4, list),
        GgufArray::I32(list) => numbers!(5, list),
        GgufArray::F32(list) => numbers!(6, list),
        GgufArray::Bool(list) => {
            begin(7, list.len(), out);
            out.extend(list.iter().map(|&flag| u8::from(flag)));
        }
        GgufArray::String(list) => {
            begin(8, list.len(), out);
            list.iter().for_each(|text| string(text, out));
        }
        GgufArray::Array(list) => {
            begin(9, list.len(), out);
            list.iter().for_each(|inner| put_array(inner, out));
        }
        GgufArray::U64(list) => numbers!(10, list),
        GgufArray::I64(list) => numbers!(11, list),
        GgufArray::F64(list) => numbers!(12, list),
    }
}
