//! Images are resized, normalized and cut into patches bit for bit as by transformers.

use std::collections::BTreeMap;

use overdrive_datasets::{
    Dataset, ImageCaptionDataset, ImageOptions, ImagePatches, ImageProcessor,
};
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
        let values = image.values();
        assert_eq!(values.len(), image.patches() * image.patch_width);
        assert_eq!(image.tokens(), image.patches() / 4);
        assert_eq!(values[..expected.values.len()], expected.values, "{name}");
        let bits = values.iter().map(|value| u64::from(value.to_bits()));
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
    // The header is enough for the size.
    assert_eq!(processor().grid(&bytes[..60]).unwrap(), [4, 6]);
    let other = ImageProcessor {
        image_mean: [0.0; 3],
        ..processor()
    };
    assert_ne!(image.digest(), other.decode(&bytes).unwrap().digest());
    for wrong in [&bytes[..20], &bytes[..60]] {
        let error = processor().decode(wrong).unwrap_err().to_string();
        assert!(error.contains("a PNG, a JPEG or a WebP"), "{error}");
    }
}

#[test]
fn a_photo_that_ends_within_its_pixels_is_refused() {
    let photo = std::fs::read(fixture("images/b.jpg")).unwrap();
    processor().decode(&photo).unwrap();
    let error = processor().decode(&photo[..photo.len() - 20]).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("ends within the pixels"), "{error}");
}

#[test]
fn values_make_an_image_if_their_number_fits_the_grid() {
    let image = ImagePatches::new(vec![0.5; 48], 12, [2, 2], 2).unwrap();
    assert_eq!((image.patches(), image.tokens()), (4, 1));
    let mut values = image.values().into_owned();
    values[7] += 0.5;
    let other = ImagePatches::new(values, 12, [2, 2], 2).unwrap();
    assert_ne!(image.digest(), other.digest());
    for (values, grid, merge, option) in [
        (47, [2, 2], 2, "values"),
        (72, [2, 3], 2, "grid"),
        (0, [0, 2], 2, "grid"),
        (48, [2, 2], 0, "grid"),
        (48, [usize::MAX - 1, 2], 2, "values"),
    ] {
        let error = ImagePatches::new(vec![0.5; values], 12, grid, merge).unwrap_err();
        assert!(error.to_string().contains(option), "{error}");
    }
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

#[test]
fn a_processor_with_impossible_fields_is_an_error_and_no_panic() {
    let usual = ImageProcessor::default;
    for (name, processor) in [
        (
            "patch_size",
            ImageProcessor {
                patch_size: 0,
                ..usual()
            },
        ),
        (
            "temporal_patch_size",
            ImageProcessor {
                temporal_patch_size: 0,
                ..usual()
            },
        ),
        (
            "merge_size",
            ImageProcessor {
                merge_size: 0,
                ..usual()
            },
        ),
        (
            "size.shortest_edge",
            ImageProcessor {
                max_pixels: 0,
                ..usual()
            },
        ),
        (
            "image_std",
            ImageProcessor {
                image_std: [0.0; 3],
                ..usual()
            },
        ),
    ] {
        let error = processor.process(vec![0; 3 * 56 * 56], 56, 56).unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
        assert!(processor.resized(56, 56).is_err(), "{name}");
    }
    assert!(usual().process([], usize::MAX, usize::MAX).is_err());
}
