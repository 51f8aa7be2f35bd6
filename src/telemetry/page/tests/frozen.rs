//! What stays frozen.

use super::*;

#[test]
fn a_file_system_that_is_frozen_for_long_is_a_problem_with_its_command() {
    let mut world = well(3, 0);
    world.pools[0].seen = Some(ago(0));
    world.pools[0].frozen = vec![frozen("volume-1", 0)];
    let shown = view(&world, "");
    assert_eq!(shown.problems.count, 0, "it has just begun");
    assert_eq!(shown.frozen.first[0].volume, "volume-1");
    let claimed = Frozen {
        claim: Some("shop/data".into()),
        ..frozen("volume-2", 4)
    };
    world.pools[0]
        .frozen
        .extend([claimed, frozen("volume-3", 2)]);
    // Its time is over.
    world.pools[1].seen = Some(ago(0));
    let over = Frozen {
        until: ago(1),
        is_held: false,
        ..frozen("volume-4", 1)
    };
    world.pools[1].frozen = vec![over];
    // It was reported after a few seconds, and may have ended.
    world.pools[2].seen = Some(ago(2));
    world.pools[2].frozen = vec![frozen("volume-5", 2)];
    let shown = view(&world, "");
    let texts: Vec<_> = shown.problems.first.iter().map(|one| &*one.text).collect();
    let expected = [
        "the file system of claim shop/data on node node-0, and 1 more of its pool, is frozen for longer than a cut takes",
        "the file system of volume volume-4 on node node-1 is frozen for longer than a cut takes",
    ];
    assert_eq!(texts, expected);
    let first = &shown.problems.first[0];
    assert_eq!(first.command.as_deref(), Some("kubectl slackwater frozen"));
    assert_eq!(first.since.as_ref().unwrap().age, "4 min");
    let rows: Vec<_> = shown
        .frozen
        .first
        .iter()
        .map(|one| (&*one.volume, one.state))
        .collect();
    let expected = [
        ("volume-2", "held"),
        ("volume-3", "held"),
        ("volume-5", "held"),
        ("volume-4", "orphaned"),
        ("volume-1", "held"),
    ];
    assert_eq!(rows, expected, "the oldest first");
    let text = page(&world, "");
    assert!(text.contains("Frozen file systems (5)"), "{text}");
    for expected in ["shop/data</td>", ">its time is over<", ">26 min</time>"] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    assert_eq!(view(&world, "shop/data").frozen.count, 1);
    assert!(!page(&well(1, 0), "").contains("Frozen file systems"));
    // Nothing reports it any more.
    world.pools[2].seen = Some(ago(9));
    let shown = view(&world, "");
    let mut texts = shown.problems.first.iter().map(|one| &*one.text);
    let last = "the file system of volume volume-5 on node node-2 was frozen for a cut when its node was seen last";
    assert!(texts.any(|text| text == last), "{:?}", shown.problems.first);
    assert!(shown.frozen.first[2].is_stale);
    world.pools[2].is_gone = true;
    assert_eq!(view(&world, "").frozen.count, 4);
}
