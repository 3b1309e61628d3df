//! A bounded run of the fuzz targets; `examples/fuzz_parsers.rs` runs them for as long as one likes.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests and their helpers fail by panicking"
)]

#[path = "common/fuzz.rs"]
mod fuzz;

/// The memory that the program, its threads and the allocator may take; inputs are a few kilobytes.
const MAX_GROWTH_MIB: u64 = 256;

// One test, so that nothing else in this process takes memory meanwhile.
#[test]
fn no_damaged_input_makes_a_reader_panic_or_take_all_memory() {
    let dir = tempfile::tempdir().unwrap();
    let before = fuzz::peak_mib();
    for target in fuzz::targets() {
        let cases = if target.name == "index_file" { 40 } else { 400 };
        let outcome = target.run(dir.path(), 20_261_121, 0, cases);
        println!("{}: {outcome:?}", target.name);
        assert_eq!(outcome.cases, cases);
        // The damage is real in most formats, and some of it harmless; a damaged index is built again.
        match target.name {
            "index_file" => assert_eq!(outcome.errors, 0),
            name => assert!(
                outcome.errors > 0 && outcome.errors < cases,
                "{name}: {outcome:?}"
            ),
        }
        if let (Some(before), Some(now)) = (before, fuzz::peak_mib()) {
            assert!(
                now < before + MAX_GROWTH_MIB,
                "{}: {now} MiB, {before} before",
                target.name
            );
        }
    }
}
