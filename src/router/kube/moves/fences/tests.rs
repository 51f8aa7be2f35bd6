//! Which fences are lifted.

use super::*;
use crate::router::kube::adopt::manifest::tests::volume;

#[test]
fn a_fence_is_lifted_only_if_its_volume_is_certainly_the_one_that_is_used() {
    let certain = || Seen {
        live: Some(volume("pv", "pool-a.source", "home-of-a")),
        ..Seen::default()
    };
    assert_eq!(decide(&certain()), Next::Step(()));
    type Doubt = fn(&mut Seen);
    let doubts: [(&str, Doubt); 5] = [
        ("no PersistentVolume", |seen| seen.live = None),
        ("names it or a copy", |seen| {
            seen.other = Some("pv-2".into());
        }),
        ("being exchanged", |seen| seen.is_stored = true),
        ("being exchanged", |seen| {
            let live = seen.live.as_mut().unwrap();
            let annotations = live.0.metadata.annotations.get_or_insert_default();
            let key = crate::router::kube::adopt::manifest::POLICY;
            annotations.insert(key.into(), "Delete".into());
        }),
        ("being exchanged", |seen| {
            let now = serde_json::from_value(serde_json::json!("2026-01-02T00:00:00Z")).unwrap();
            let live = seen.live.as_mut().unwrap();
            live.0.metadata.deletion_timestamp = Some(now);
        }),
    ];
    for (words, doubt) in doubts {
        let mut seen = certain();
        doubt(&mut seen);
        match decide(&seen) {
            Next::Refused(why) => assert!(why.contains(words), "{why}"),
            next => panic!("{words}: {next:?}"),
        }
        seen.has_move = true;
        assert_eq!(decide(&seen), Next::Wait);
    }
}
