//! Images are resized, normalized and cut into patches bit for bit as by transformers.

use std::collections::BTreeMap;

use overdrive_datasets::{Dataset, ImageCaptionDataset, ImageOptions, ImageProcessor};
use serde::Deserialize;
use serde_json::json;

use crate::common::fixture;

#[derive(Deserialize)]
struct Expected {
    grid: [usize; 3],
    values: Vec<f32>,
    sum: String,
}

fn processor() -> ImageProcessor {
    let processor = ImageProcessor::from_dir(fixture("image_patches")).unwrap();
    processor.expect("the folder has a processor")
}

#[test]
fn patches_equal_those_of_transformers_bit_for_bit() {
    let file = fixture("image_patches/expected.json");
    let text = std::fs::read_to_string(file).expect("run gen_image_patches.py");
    let expected: BTreeMap<String, Expected> = serde_json::from_str(&text).unwrap();
    let images = fixture("image_patches/captions.jsonl");
    let images = ImageCaptionDataset::open([images], ImageOptions::default()).unwrap();
    let images = images.with_processor(processor());
    assert_eq!(images.len(), expected.len());
    for index in 0..images.len() {
        let row = images.get(index).unwrap();
        let name = row.path.file_name().unwrap().to_str().unwrap();
        assert_eq!(row.caption, format!("The image {name}."));
        let (image, expected) = (row.image, &expected[name]);
        assert_eq!([1, image.grid[0], image.grid[1]], expected.grid, "{name}");
        assert_eq!(
            image.pixels.len(),
            image.grid[0] * image.grid[1] * image.patch_width
        );
        assert_eq!(image.tokens(), image.grid[0] * image.grid[1] / 4);
        assert_eq!(
            image.pixels[..expected.values.len()],
            expected.values,
            "{name}"
        );
        let bits = image.pixels.iter().map(|value| u64::from(value.to_bits()));
        let sum = bits
            .zip(0_u64..)
            .map(|(bits, index)| bits * (index % 1009 + 1));
        assert_eq!(sum.sum::<u64>().to_string(), expected.sum, "{name}");
    }
}

#[test]
fn a_decoded_file_has_the_patches_of_its_pixels() {
    let bytes = std::fs::read(fixture("image_patches/32x48.png")).unwrap();
    let image = processor().decode(&bytes).unwrap();
    assert_eq!(image.grid, [4, 6]);
    assert_eq!(image.digest(), processor().decode(&bytes).unwrap().digest());
    let mut other = image.clone();
    other.pixels[100] += 0.5;
    assert_ne!(image.digest(), other.digest());
    let error = processor().decode(&bytes[..40]).unwrap_err().to_string();
    assert!(error.contains("a PNG, a JPEG or a WebP"), "{error}");
}

#[test]
fn options_that_would_change_the_pixels_are_refused_by_key() {
    for (key, value) in [
        ("image_processor_type", json!("CLIPImageProcessor")),
        ("resample", json!(2)),
        ("do_normalize", json!(false)),
        ("rescale_factor", json!(0.5)),
        ("image_std", json!([1.0, 0.0, 1.0])),
        ("image_mean", json!([0.5])),
        ("patch_size", json!(0)),
    ] {
        let error = ImageProcessor::from_json(&json!({ key: value })).unwrap_err();
        assert!(error.to_string().contains(key), "{key}: {error}");
    }
    let narrow = processor().resized(10, 3000).unwrap_err().to_string();
    assert!(narrow.contains("10 x 3000"), "{narrow}");
    let usual = ImageProcessor::from_json(&json!({"rescale_factor": 0.00392156862745098}));
    assert_eq!(usual.unwrap(), ImageProcessor::default());
}
