//! The rules of the search, without a memory budget (which has its own test binary).

use overdrive_accumulation::{
    SearchError, find_executable_batch_size, find_executable_batch_size_with,
};
use tch::TchError;

fn out_of_memory() -> TchError {
    TchError::Torch("CUDA out of memory. Tried to allocate 2.00 GiB.".into())
}

#[test]
fn sizes_are_halved_until_one_fits() {
    let mut tried = Vec::new();
    let found = find_executable_batch_size(100, |size| {
        tried.push(size);
        if size > 12 {
            Err(out_of_memory())
        } else {
            Ok(size * 2)
        }
    })
    .unwrap();
    assert_eq!(tried, [100, 50, 25, 12]);
    assert_eq!((found.batch, found.value), (12, 24));
}

#[test]
fn other_errors_pass_through_at_once() {
    let mut calls = 0;
    let error = find_executable_batch_size(8, |_| -> Result<(), TchError> {
        calls += 1;
        Err(TchError::Shape("2 against 3".into()))
    })
    .unwrap_err();
    assert!(matches!(error, SearchError::Failed(TchError::Shape(_))));
    assert_eq!(error.to_string(), "invalid shape: 2 against 3");
    assert_eq!(calls, 1);
}

#[test]
fn an_error_that_wraps_out_of_memory_counts_as_one() {
    let found = find_executable_batch_size(4, |size| {
        if size > 1 {
            return Err(overdrive_accumulation::Error::Optimizer(
                out_of_memory().into(),
            ));
        }
        Ok(())
    });
    assert_eq!(found.unwrap().batch, 1);
}

#[test]
fn if_nothing_fits_the_error_names_the_sizes_that_were_tried() {
    let error = find_executable_batch_size(5, |_| Err::<(), _>(out_of_memory()))
        .unwrap_err()
        .to_string();
    assert!(error.starts_with("no batch size fits into memory: tried [5, 2, 1], the last of which failed with: Internal torch error: CUDA out of memory."), "{error}");
}

#[test]
fn the_reduction_is_the_callers_and_must_reduce() {
    let fits = |error: &String| error.contains("memory").then(|| error.clone());
    let mut tried = Vec::new();
    let found = find_executable_batch_size_with(
        20,
        |size| size * 9 / 10,
        fits,
        |size| {
            tried.push(size);
            if size > 15 {
                Err("memory".to_string())
            } else {
                Ok(())
            }
        },
    )
    .unwrap();
    assert_eq!((found.batch, tried), (14, vec![20, 18, 16, 14]));

    let stuck = find_executable_batch_size_with(
        20,
        |size| size,
        fits,
        |_| Err::<(), _>("memory".to_string()),
    );
    assert!(matches!(
        stuck,
        Err(SearchError::NotReduced { from: 20, to: 20 })
    ));
    let zero = find_executable_batch_size(0, |_| Err::<(), _>(out_of_memory())).unwrap_err();
    assert_eq!(
        zero.to_string(),
        "`starting_batch_size` is 0; it must be at least 1"
    );
}

#[test]
fn panics_of_tch_with_out_of_memory_are_caught_and_others_are_not() {
    let found = find_executable_batch_size(4, |size| -> Result<(), TchError> {
        assert!(
            size <= 2,
            "called `Result::unwrap()` on an `Err` value: {:?}",
            out_of_memory()
        );
        Ok(())
    });
    assert_eq!(found.unwrap().batch, 2);

    let other = std::panic::catch_unwind(|| {
        find_executable_batch_size(4, |_| -> Result<(), TchError> {
            panic!("index out of range")
        })
    });
    let payload = other.unwrap_err();
    assert_eq!(payload.downcast_ref::<&str>(), Some(&"index out of range"));
}
