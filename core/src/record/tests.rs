//! Tests of records that programs of two releases exchange: fields that the older one does not know
//! are kept.

use std::path::Path;

use serde::Deserialize;
use serde_json::json;

use super::*;
use crate::host::memory::MemoryHost;

const PATH: &str = "/memory/record.json";

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Known {
    name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    stage: Option<Stage>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    uses: Vec<Stage>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    shredded: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Stage {
    at: String,
}

impl Record for Known {
    const VERSION: u32 = 2;
    const WHAT: &'static str = "record of a test";

    fn written_version(&self) -> u32 {
        if self.shredded { 2 } else { 1 }
    }
}

/// The content of a file after this program has changed its record.
fn rewritten(before: Value, change: impl FnOnce(&mut Known)) -> Value {
    let host = MemoryHost::new();
    let path = Path::new(PATH);
    host.put_file(path, before.to_string().as_bytes()).unwrap();
    let mut record = load::<Known>(&host, path).unwrap().unwrap();
    change(&mut record);
    store(&host, path, &record).unwrap();
    serde_json::from_slice(&host.read_file(path).unwrap().unwrap()).unwrap()
}

#[test]
fn unknown_fields_are_kept_also_within_changed_objects() {
    let before = json!({
        "version": 1, "name": "a", "lineage": {"of": ["x", 1, null]},
        "stage": {"at": "/old", "by": "newer"},
        "uses": [{"at": "1", "why": "p"}, {"at": "2", "why": "q"}],
    });
    let after = rewritten(before, |record| {
        record.name = "b".into();
        record.stage.as_mut().unwrap().at = "/new".into();
    });
    let expected = json!({
        "version": 1, "name": "b", "lineage": {"of": ["x", 1, null]},
        "stage": {"at": "/new", "by": "newer"},
        "uses": [{"at": "1", "why": "p"}, {"at": "2", "why": "q"}],
    });
    assert_eq!(after, expected);
}

#[test]
fn a_field_that_this_program_removes_is_removed_with_its_content() {
    let before = json!({
        "version": 1, "name": "a",
        "stage": {"at": "/old", "by": "newer"},
        "uses": [{"at": "1", "why": "p"}, {"at": "2"}],
    });
    let after = rewritten(before, |record| {
        record.stage = None;
        record.uses.remove(0);
    });
    assert_eq!(
        after,
        json!({"version": 1, "name": "a", "uses": [{"at": "2"}]})
    );
}

#[test]
fn the_written_version_is_the_lowest_that_understands_the_record() {
    let before = json!({"version": 1, "name": "a"});
    assert_eq!(rewritten(before.clone(), |_| {})["version"], 1);
    let shredded = rewritten(before, |record| record.shredded = true);
    assert_eq!(shredded["version"], 2);
    assert_eq!(
        rewritten(shredded, |record| record.shredded = false)["version"],
        1
    );
}

#[test]
fn newer_and_damaged_records_are_never_replaced() {
    let host = MemoryHost::new();
    let path = Path::new(PATH);
    for text in [r#"{"version": 3, "name": "a"}"#, "{}", "not JSON"] {
        host.put_file(path, text.as_bytes()).unwrap();
        let refused = store(&host, path, &Known::default()).unwrap_err();
        assert!(matches!(refused, Error::Damaged { .. }), "{refused}");
        assert_eq!(host.read_file(path).unwrap().unwrap(), text.as_bytes());
    }
}

/// Records that exist on disks today have version 1, which is also what an earlier release reads.
#[test]
fn records_without_newer_meaning_are_written_for_the_first_release() {
    let node = NodeRecord::default();
    assert_eq!(value(&node).unwrap()["version"], 1);
}
