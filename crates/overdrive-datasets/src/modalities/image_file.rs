//! Image files: their size and their pixels, upright.

use std::io::Cursor;

use image::error::{DecodingError, ImageFormatHint};
use image::metadata::Orientation;
use image::{
    DynamicImage, ImageDecoder, ImageError, ImageFormat, ImageReader, ImageResult, Limits,
};

/// Decodes an image and rotates it according to its EXIF orientation.
pub(super) fn decode(bytes: &[u8]) -> ImageResult<DynamicImage> {
    check_end(bytes)?;
    let mut decoder = decoder(bytes)?;
    let orientation = decoder.orientation()?;
    let mut image = DynamicImage::from_decoder(decoder)?;
    image.apply_orientation(orientation);
    Ok(image)
}

/// Returns the width and height of the image that [`decode`] returns, without decoding its pixels.
pub(super) fn upright_size(bytes: &[u8]) -> ImageResult<(u32, u32)> {
    let mut decoder = decoder(bytes)?;
    let (width, height) = decoder.dimensions();
    Ok(match decoder.orientation()? {
        Orientation::Rotate90
        | Orientation::Rotate270
        | Orientation::Rotate90FlipH
        | Orientation::Rotate270FlipH => (height, width),
        _ => (width, height),
    })
}

fn decoder(bytes: &[u8]) -> ImageResult<impl ImageDecoder> {
    // The format is determined by the content, not by the extension.
    let reader = ImageReader::new(Cursor::new(bytes)).with_guessed_format()?;
    let mut decoder = reader.into_decoder()?;
    // As in `ImageReader::decode`, the pixels count towards the memory limit.
    let mut limits = Limits::default();
    limits.reserve(decoder.total_bytes())?;
    decoder.set_limits(limits)?;
    Ok(decoder)
}

/// Refuses a JPEG that ends within its pixels, whose decoder would make up the missing ones. Pillow refuses it too.
fn check_end(bytes: &[u8]) -> ImageResult<()> {
    const SCAN: [u8; 2] = [0xff, 0xda];
    const END: [u8; 2] = [0xff, 0xd9];
    let is_jpeg = image::guess_format(bytes).is_ok_and(|format| format == ImageFormat::Jpeg);
    let last = |mark: [u8; 2]| bytes.windows(2).rposition(|pair| pair == mark);
    if !is_jpeg || last(END) > last(SCAN) {
        return Ok(());
    }
    let format = ImageFormatHint::Exact(ImageFormat::Jpeg);
    let error = DecodingError::new(format, "the file ends within the pixels");
    Err(ImageError::Decoding(error))
}
