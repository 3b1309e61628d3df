//! Images are decoded and resized as by Pillow.

use std::collections::BTreeMap;

use crate::common::{fixture, write_files};
use overdrive_datasets::{
    Dataset, Error, ErrorLog, ErrorPolicy, ImageAugmentation, ImageCaptionDataset, ImageOptions,
    ImageResize,
};

fn options(resize: ImageResize) -> ImageOptions {
    ImageOptions {
        height: 16,
        width: 16,
        resize,
        mean: [0.0; 3],
        std: [1.0; 3],
        ..ImageOptions::default()
    }
}

#[test]
fn images_are_those_of_pillow_within_rounding() {
    let expected = std::fs::read(fixture("images/expected.json")).unwrap();
    let expected: BTreeMap<String, BTreeMap<String, Vec<f32>>> =
        serde_json::from_slice(&expected).unwrap();
    for (kind, resize) in [
        ("stretch", ImageResize::Stretch),
        ("crop", ImageResize::Crop),
    ] {
        let images =
            ImageCaptionDataset::open([fixture("images/captions.jsonl")], options(resize)).unwrap();
        assert_eq!(images.len(), 5);
        for index in 0..5 {
            let image = images.get(index).unwrap();
            let name = image.path.file_name().unwrap().to_str().unwrap();
            assert_eq!(image.caption, format!("The image {name}."));
            let expected = &expected[name][kind];
            assert_eq!(
                (image.pixels.len(), image.height, image.width),
                (expected.len(), 16, 16)
            );
            let tolerance = if name.ends_with("jpg") { 6.0 } else { 1.5 } / 255.0;
            for (found, expected) in image.pixels.iter().zip(expected) {
                assert!(
                    (found - expected).abs() <= tolerance,
                    "{name} {kind}: {found} {expected}"
                );
            }
        }
    }
}

#[test]
fn pixels_are_normalised_channel_by_channel() {
    let normal = ImageOptions {
        mean: [0.5, 0.25, 0.0],
        std: [0.5, 0.25, 2.0],
        ..options(ImageResize::Crop)
    };
    let plain = ImageCaptionDataset::open(
        [fixture("images/captions.jsonl")],
        options(ImageResize::Crop),
    )
    .unwrap();
    let normal = ImageCaptionDataset::open([fixture("images/captions.jsonl")], normal).unwrap();
    let (plain, normal) = (plain.get(0).unwrap().pixels, normal.get(0).unwrap().pixels);
    for (at, (plain, normal)) in plain.iter().zip(&normal).enumerate() {
        let (mean, std) = [(0.5, 0.5), (0.25, 0.25), (0.0, 2.0)][at / 256];
        assert!(((plain - mean) / std - normal).abs() < 1e-6);
    }
}

#[test]
fn photos_are_upright_by_the_orientation_in_their_exif_data() {
    let dir = tempfile::tempdir().unwrap();
    let plain = std::fs::read(fixture("images/b.jpg")).unwrap();
    // A segment with one entry, the orientation, after the start of the image.
    let with_orientation = |orientation: u8| {
        let mut exif = b"\xff\xe1\x00\x22Exif\0\0II*\0\x08\0\0\0\x01\0".to_vec();
        exif.extend_from_slice(b"\x12\x01\x03\0\x01\0\0\0");
        exif.extend_from_slice(&[orientation, 0, 0, 0, 0, 0, 0, 0]);
        [&plain[..2], &exif, &plain[2..]].concat()
    };
    write_files(
        dir.path(),
        &[
            ("0.jpg", plain.clone()),
            ("1.jpg", with_orientation(1)),
            ("3.jpg", with_orientation(3)),
            ("6.jpg", with_orientation(6)),
        ],
    );
    let rows =
        ["0", "1", "3", "6"].map(|name| format!("{{\"image\": \"{name}.jpg\", \"text\": \"\"}}\n"));
    write_files(dir.path(), &[("rows.jsonl", rows.concat())]);
    let path = dir.path().join("rows.jsonl");
    let images = ImageCaptionDataset::open([&path], options(ImageResize::Stretch)).unwrap();
    let pixels = |index| images.get(index).unwrap().pixels;
    let stored = pixels(0);
    assert_eq!(pixels(1), stored);
    // The largest difference from the stored pixels at the place that each pixel comes from.
    let difference = |index, from: fn(usize, usize) -> (usize, usize)| {
        let upright = pixels(index);
        let places = (0..3 * 256).map(|at| (at / 256, at / 16 % 16, at % 16));
        let differences = places.map(|(channel, y, x)| {
            let (from_y, from_x) = from(y, x);
            let stored = stored[channel * 256 + from_y * 16 + from_x];
            (upright[channel * 256 + y * 16 + x] - stored).abs()
        });
        differences.fold(0.0, f32::max)
    };
    // Rounding differs, as the sides are resized in another order.
    let tolerance = 2.0 / 255.0;
    assert!(difference(2, |y, x| (15 - y, 15 - x)) <= tolerance);
    assert!(difference(3, |y, x| (15 - x, y)) <= tolerance);
    assert!(difference(2, |y, x| (y, x)) > 0.1 && difference(3, |y, x| (y, x)) > 0.1);
}

#[test]
fn images_that_are_missing_or_damaged_are_errors_of_their_records() {
    let dir = tempfile::tempdir().unwrap();
    let png = std::fs::read(fixture("images/a.png")).unwrap();
    write_files(
        dir.path(),
        &[
            ("good.png", &png[..]),
            ("cut.png", &png[..png.len() / 2]),
            ("none.png", b"text"),
        ],
    );
    let rows = ["good.png", "missing.png", "cut.png", "none.png"]
        .map(|name| format!("{{\"image\": \"{name}\", \"text\": \"\"}}\n"));
    let path = dir.path().join("rows.jsonl");
    std::fs::write(
        &path,
        rows.concat() + "{\"image\": 5, \"text\": \"\"}\n{\"image\": \"good.png\"}\n",
    )
    .unwrap();
    let images = ImageCaptionDataset::open([&path], options(ImageResize::Crop)).unwrap();
    assert!(images.get(0).is_ok());
    for (index, problem) in [
        (1, "missing.png: "),
        (2, "cut.png: "),
        (3, "none.png: "),
        (4, "it has no text in the field \"image\""),
        (5, "it has no text in the field \"text\""),
    ] {
        let error = images.get(index).unwrap_err();
        assert!(error.is_about_record());
        let text = error.to_string();
        assert!(
            text.contains(&format!("rows.jsonl, record {index} (byte")) && text.contains(problem),
            "{text}"
        );
    }
    let log = ErrorLog::default();
    assert!(ErrorPolicy::Skip.get(&images, 1, &log).unwrap().is_none());
    assert_eq!(
        ErrorPolicy::Replace
            .get(&images, 1, &log)
            .unwrap()
            .unwrap()
            .path,
        dir.path().join("good.png")
    );
}

#[test]
#[cfg(target_os = "linux")]
fn an_error_of_the_disk_is_none_of_the_record_that_names_the_image() {
    // Reading the first byte of the memory of a process is such an error.
    let row = "{\"image\": \"/proc/self/mem\", \"text\": \"a\"}\n";
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("captions.jsonl");
    std::fs::write(&path, row).unwrap();
    let images = ImageCaptionDataset::open([path], options(ImageResize::Crop)).unwrap();
    let error = ErrorPolicy::Skip
        .get(&images, 0, &ErrorLog::default())
        .unwrap_err();
    assert!(matches!(error, Error::Common(_)), "{error}");
}

#[test]
fn sizes_and_deviations_are_checked() {
    let open = |options| ImageCaptionDataset::open([fixture("images/captions.jsonl")], options);
    let none = ImageOptions {
        height: 0,
        ..ImageOptions::default()
    };
    assert!(matches!(
        open(none),
        Err(Error::Common(overdrive_core::Error::InvalidOption { option, .. })) if option == "height"
    ));
    let zero = ImageOptions {
        std: [1.0, 0.0, 1.0],
        ..ImageOptions::default()
    };
    assert!(matches!(
        open(zero),
        Err(Error::Common(overdrive_core::Error::InvalidOption { option, .. })) if option == "std"
    ));
}

#[test]
fn augmentation_is_a_function_of_the_seed_and_the_image() {
    let augmented = |seed| {
        let options = ImageOptions {
            augmentation: Some(ImageAugmentation {
                seed,
                ..ImageAugmentation::default()
            }),
            ..options(ImageResize::Crop)
        };
        ImageCaptionDataset::open([fixture("images/captions.jsonl")], options).unwrap()
    };
    let all = |images: &ImageCaptionDataset| -> Vec<Vec<f32>> {
        (0..images.len())
            .map(|index| images.get(index).unwrap().pixels)
            .collect()
    };
    let (first, second) = (augmented(1), augmented(2));
    assert_eq!(all(&first), all(&augmented(1)));
    assert_eq!(all(&first.with_seed(2)), all(&second));
    for (one, other) in all(&first).iter().zip(&all(&second)) {
        assert_ne!(one, other);
    }
    // In any order.
    let last = first.get(4).unwrap();
    assert_eq!(last.pixels, all(&first)[4]);
    assert_eq!((last.height, last.width), (16, 16));

    let plain = ImageCaptionDataset::open(
        [fixture("images/captions.jsonl")],
        options(ImageResize::Crop),
    )
    .unwrap();
    assert_eq!(all(&plain.with_seed(5)), all(&plain));
    for (augmentation, name) in [
        (
            ImageAugmentation {
                scale: (0.0, 1.0),
                ..ImageAugmentation::default()
            },
            "scale",
        ),
        (
            ImageAugmentation {
                ratio: (2.0, 1.0),
                ..ImageAugmentation::default()
            },
            "ratio",
        ),
        (
            ImageAugmentation {
                flip: 1.5,
                ..ImageAugmentation::default()
            },
            "flip",
        ),
    ] {
        let options = ImageOptions {
            augmentation: Some(augmentation),
            ..options(ImageResize::Crop)
        };
        let error = ImageCaptionDataset::open([fixture("images/captions.jsonl")], options);
        let error = error.unwrap_err().to_string();
        assert!(error.contains(&format!("`{name}`")), "{error}");
    }
}

#[test]
fn a_mirrored_image_is_the_image_from_right_to_left() {
    let augmented = |flip| {
        let options = ImageOptions {
            augmentation: Some(ImageAugmentation {
                flip,
                ..ImageAugmentation::default()
            }),
            ..options(ImageResize::Crop)
        };
        ImageCaptionDataset::open([fixture("images/captions.jsonl")], options).unwrap()
    };
    let (never, always) = (augmented(0.0), augmented(1.0));
    for index in 0..5 {
        let (plain, mirrored) = (never.get(index).unwrap(), always.get(index).unwrap());
        let reversed: Vec<f32> = plain
            .pixels
            .chunks(16)
            .flat_map(|row| row.iter().rev().copied())
            .collect();
        assert_eq!(mirrored.pixels, reversed);
    }
}

#[cfg(feature = "tch")]
#[test]
fn images_are_stacked_and_captions_padded() {
    use overdrive_datasets::{collate_captions, collate_images};
    use tch::Tensor;
    let images = ImageCaptionDataset::open(
        [fixture("images/captions.jsonl")],
        options(ImageResize::Crop),
    )
    .unwrap();
    let pairs = [
        (images.get(0).unwrap(), vec![5, 6, 7]),
        (images.get(3).unwrap(), vec![8]),
    ];
    let batch = collate_captions(&pairs, 1).unwrap();
    assert_eq!(batch.pixel_values.size(), [2, 3, 16, 16]);
    assert_eq!(batch.pixel_values.get(1), pairs[1].0.to_tensor().unwrap());
    assert_eq!(
        batch.input_ids,
        Tensor::from_slice2(&[[5_i64, 6, 7], [8, 1, 1]])
    );
    assert_eq!(
        batch.attention_mask,
        Some(Tensor::from_slice2(&[[1_i64, 1, 1], [1, 0, 0]]))
    );
    let rows: Vec<_> = pairs.iter().map(|(image, _)| image.clone()).collect();
    assert_eq!(collate_images(&rows).unwrap(), batch.pixel_values);
    assert!(collate_images(&[]).is_err());
    let larger = ImageOptions {
        width: 8,
        ..options(ImageResize::Crop)
    };
    let larger = ImageCaptionDataset::open([fixture("images/captions.jsonl")], larger).unwrap();
    let error = collate_images(&[rows[0].clone(), larger.get(0).unwrap()])
        .unwrap_err()
        .to_string();
    assert!(error.contains("16 x 8 (row 1)"), "{error}");
}
