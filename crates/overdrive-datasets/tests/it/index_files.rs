//! Index files: written once, reused, and rebuilt when the data changes or they are damaged.

use std::path::{Path, PathBuf};

use overdrive_datasets::{
    Dataset, IndexLocation, IndexOptions, TextLines, TextOptions, find_files,
};

fn in_folder(dir: &Path) -> IndexOptions {
    IndexOptions {
        location: IndexLocation::Folder(dir.join("index")),
        ..IndexOptions::default()
    }
}

fn all<D: Dataset>(dataset: &D) -> Vec<D::Item> {
    (0..dataset.len())
        .map(|i| dataset.get(i).unwrap())
        .collect()
}

/// Returns a file that is large enough for an index file of its own.
fn large_text(dir: &Path) -> (PathBuf, Vec<String>) {
    let lines: Vec<String> = (0..40_000)
        .map(|i| format!("line {i} {}", "x".repeat(i % 60)))
        .collect();
    let path = dir.join("large.txt");
    std::fs::write(&path, lines.join("\n")).unwrap();
    (path, lines)
}

fn open_text(path: &Path, index: &IndexOptions) -> TextLines {
    let options = TextOptions {
        index: index.clone(),
        ..TextOptions::default()
    };
    TextLines::open([path], &options).unwrap()
}

fn index_file(dir: &Path) -> PathBuf {
    let files = find_files([dir.join("index")], &["ovidx"]).unwrap();
    assert_eq!(files.len(), 1);
    files[0].clone()
}

#[test]
fn an_index_file_is_written_once_and_used_afterwards() {
    let dir = tempfile::tempdir().unwrap();
    let (path, lines) = large_text(dir.path());
    let options = in_folder(dir.path());
    let built = open_text(&path, &options);
    assert_eq!(
        built.records().report().built_bytes,
        std::fs::metadata(&path).unwrap().len()
    );
    let opened = open_text(&path, &options);
    assert_eq!(opened.records().report().built_bytes, 0);
    assert_eq!(all(&opened), lines);
    let bytes = opened.records().report().bytes_per_record();
    assert!(bytes < 1.1, "{bytes} bytes a record");
    assert_eq!(
        built.records().fingerprint().unwrap(),
        opened.records().fingerprint().unwrap()
    );

    let rebuild = IndexOptions {
        rebuild: true,
        ..options
    };
    assert!(open_text(&path, &rebuild).records().report().built_bytes > 0);
}

#[test]
fn an_index_is_built_again_when_the_data_changes() {
    let dir = tempfile::tempdir().unwrap();
    let (path, mut lines) = large_text(dir.path());
    let options = in_folder(dir.path());
    let before = open_text(&path, &options).records().fingerprint().unwrap();
    let modified = std::fs::metadata(&path).unwrap().modified().unwrap();

    // Longer, but of the same time.
    lines.push("one more".to_owned());
    std::fs::write(&path, lines.join("\n")).unwrap();
    std::fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_modified(modified)
        .unwrap();
    let changed = open_text(&path, &options);
    assert_eq!(all(&changed), lines);
    assert_ne!(changed.records().fingerprint().unwrap(), before);

    // As long and of the same time, but other bytes at the start.
    drop(changed);
    lines[0] = "lin\n 0 ".to_owned();
    std::fs::write(&path, lines.join("\n")).unwrap();
    std::fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_modified(modified)
        .unwrap();
    assert_eq!(open_text(&path, &options).len(), lines.len() + 1);

    // Cut short.
    std::fs::write(&path, &lines.join("\n")[..1_200_000]).unwrap();
    let cut = open_text(&path, &options);
    assert!(cut.len() < lines.len());
    assert_eq!(
        cut.get(cut.len() - 1).unwrap().len(),
        1_200_000 - cut.records().location(cut.len() - 1).unwrap().offset as usize
    );
}

#[test]
fn a_damaged_index_is_built_again() {
    let dir = tempfile::tempdir().unwrap();
    let (path, lines) = large_text(dir.path());
    let options = in_folder(dir.path());
    open_text(&path, &options);
    let index = index_file(dir.path());
    let sound = std::fs::read(&index).unwrap();
    let mut damages: Vec<Vec<u8>> = vec![
        Vec::new(),
        b"short".to_vec(),
        sound[..sound.len() - 1].to_vec(),
    ];
    // Each byte of the header; then of pieces and directory one in 97.
    for at in (0..128).chain((128..sound.len()).step_by(97)) {
        let mut damaged = sound.clone();
        damaged[at] ^= 0x55;
        damages.push(damaged);
    }
    for damaged in damages {
        std::fs::write(&index, &damaged).unwrap();
        let opened = open_text(&path, &options);
        assert!(opened.records().report().built_bytes > 0);
        assert_eq!(opened.len(), lines.len());
        assert_eq!(std::fs::read(&index).unwrap(), sound);
    }
}

#[test]
fn concurrent_builds_of_an_index_agree_and_leave_no_temporary_file() {
    let dir = tempfile::tempdir().unwrap();
    let (path, lines) = large_text(dir.path());
    let options = in_folder(dir.path());
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| assert_eq!(open_text(&path, &options).len(), lines.len()));
        }
    });
    let names: Vec<String> = std::fs::read_dir(dir.path().join("index"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    assert!(
        names
            .iter()
            .all(|name| name.ends_with(".ovidx") || name.ends_with(".lock")),
        "{names:?}"
    );
}

#[test]
fn an_index_is_kept_beside_the_data_or_in_memory_by_option_or_if_a_folder_fails() {
    let dir = tempfile::tempdir().unwrap();
    let (path, lines) = large_text(dir.path());
    let at = |location| IndexOptions {
        location,
        ..IndexOptions::default()
    };
    open_text(&path, &at(IndexLocation::Beside));
    let hidden = |entry: &std::fs::DirEntry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        name.starts_with(".large.txt.") && name.ends_with(".ovidx")
    };
    let count = std::fs::read_dir(dir.path())
        .unwrap()
        .filter(|entry| hidden(entry.as_ref().unwrap()))
        .count();
    assert_eq!(count, 1);
    assert_eq!(
        open_text(&path, &at(IndexLocation::Beside))
            .records()
            .report()
            .built_bytes,
        0
    );
    assert!(
        open_text(&path, &at(IndexLocation::Memory))
            .records()
            .report()
            .built_bytes
            > 0
    );
    // A file is where the folder should be: no index file can be written.
    let blocked = at(IndexLocation::Folder(path.join("below a file")));
    assert_eq!(open_text(&path, &blocked).len(), lines.len());
}
