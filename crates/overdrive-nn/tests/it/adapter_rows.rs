//! The runs of rows and their adapters.

use std::sync::Arc;

use overdrive_nn::AdapterRows;

#[test]
fn a_row_that_does_not_exist_is_refused_by_its_number() {
    let name: Arc<str> = "a".into();
    let rows = AdapterRows::new([(2, Some(Arc::clone(&name))), (1, None)]);
    let selected = rows.select(&[2, 0]).unwrap();
    assert_eq!(
        selected.runs().collect::<Vec<_>>(),
        [(0, 1, None), (1, 1, Some("a"))]
    );
    for row in [-1, 3, i64::MIN] {
        let message = rows.select(&[0, row]).unwrap_err().to_string();
        assert_eq!(
            message,
            format!("`row` is {row}; it must be at least 0 and below 3, the number of rows")
        );
    }
}
