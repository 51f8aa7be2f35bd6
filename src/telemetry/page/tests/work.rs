//! Running work: its order, its time left, and how old its progress is.

use super::*;

/// A quarter of the bytes were copied in ten minutes.
pub(super) fn copy() -> Work {
    Work {
        resource: "volumemoves",
        namespace: "shop".into(),
        name: "away".into(),
        what: "move of claim shop/data".into(),
        phase: "Copying".into(),
        done_bytes: 1 << 30,
        total_bytes: 4 << 30,
        copying_since: Some(ago(10)),
        since: Some(ago(12)),
        ..Work::default()
    }
}

/// A claim that has received a half of 8 GiB, of which 3 GiB by another attempt.
fn fill() -> Work {
    Work {
        resource: "httpsources",
        what: "claim shop/vm is filled from HttpSource".into(),
        phase: "Populating".into(),
        done_bytes: 4 << 30,
        total_bytes: 8 << 30,
        done_before: 3 << 30,
        copying_since: Some(ago(11)),
        reported: Some(ago(1)),
        ..copy()
    }
}

fn of(work: Vec<Work>) -> World {
    World {
        work,
        pools: vec![pool(0, "node-0")],
        ..empty()
    }
}

#[test]
fn the_rate_is_that_of_the_attempt_until_its_last_report() {
    let left = |work: Work| view(&of(vec![work]), "").work.first[0].left_seconds;
    assert_eq!(left(fill()), Some(4 * 10 * 60), "1 GiB in 10 minutes");
    let whole = Work {
        done_bytes: 8 << 30,
        ..fill()
    };
    assert_eq!(left(whole), None, "what follows the copy has no rate");
    let again = Work {
        done_bytes: 2 << 30,
        ..fill()
    };
    assert_eq!(left(again), None, "less than at its beginning");
    let unknown = Work {
        total_bytes: 0,
        ..fill()
    };
    assert_eq!(left(unknown), None);
    let text = page(&of(vec![fill()]), "");
    let age = "(began <time datetime=\"2027-01-15T07:48:00Z\">12 min</time> ago)";
    assert!(
        text.contains("about 40 min") && text.contains(age),
        "{text}"
    );
}

#[test]
fn work_without_numbers_has_its_age_and_no_estimate() {
    let waiting = Work {
        phase: "Waiting".into(),
        done_bytes: 0,
        total_bytes: 0,
        copying_since: None,
        ..copy()
    };
    let text = page(&of(vec![waiting]), "");
    assert!(
        text.contains("no estimate <span class=\"quiet\">(began <time"),
        "{text}"
    );
    let evacuation = Work {
        resource: "pools",
        volumes: Some((2, 5)),
        ..copy()
    };
    let text = page(&of(vec![evacuation]), "");
    assert!(
        text.contains("2 of 5 volumes, 1.0 GiB of 4.0 GiB") && text.contains("about 30 min"),
        "{text}"
    );
}

#[test]
fn outdated_work_is_grey_with_its_age_and_has_no_estimate() {
    let row = |world: &World| {
        let mut found = view(world, "").work.first;
        let row = found.remove(0);
        let text = page(world, "");
        let work = text.split("id=\"work\"").nth(1).unwrap().to_string();
        assert_eq!(
            work.contains("<tr class=\"stale\">"),
            row.is_stale,
            "{work}"
        );
        assert_eq!(work.contains("outdated</span>, was"), row.is_stale);
        assert_eq!(work.contains("no estimate"), row.left_seconds.is_none());
        (row.is_stale, row.left_seconds.is_some(), row.reported)
    };
    let age = |row: (bool, bool, Option<super::text::When>)| {
        (row.0, row.1, row.2.map(|reported| reported.age_seconds))
    };
    assert_eq!(age(row(&of(vec![fill()]))), (false, true, Some(60)));
    let silent = Work {
        reported: Some(ago(4)),
        ..fill()
    };
    assert_eq!(age(row(&of(vec![silent]))), (true, false, Some(240)));

    // The agent that reports the bytes of a move does not answer any more.
    let of_pool = Work {
        pools: vec![pool(0, "").id, "of another cluster".into()],
        ..copy()
    };
    let mut world = of(vec![of_pool]);
    assert_eq!(age(row(&world)), (false, true, None));
    world.pools[0].seen = Some(ago(5));
    assert_eq!(age(row(&world)), (true, false, Some(300)));
    world.pools[0].seen = None;
    assert_eq!(age(row(&world)), (true, false, None));

    let world = World {
        problem: Some("no watch".into()),
        ..of(vec![fill()])
    };
    assert_eq!(age(row(&world)), (true, false, Some(60)));
}

#[test]
fn what_failed_is_first_then_evacuations_then_what_makes_progress() {
    let named = |name: &str, work: Work| Work {
        name: name.into(),
        ..work
    };
    let waiting = Work {
        copying_since: None,
        ..copy()
    };
    let all = [
        named(
            "failed",
            Work {
                failing: Some(ago(1)),
                ..waiting.clone()
            },
        ),
        named(
            "evacuation",
            Work {
                resource: "pools",
                ..waiting.clone()
            },
        ),
        named("fill", fill()),
        named("copy-1", copy()),
        named("copy-2", copy()),
        named("waiting", waiting),
    ];
    let order = |work: Vec<Work>| {
        let rows = view(&of(work), "").work.first;
        let names = rows.iter().map(|row| row.object.split_once('/').unwrap().1);
        names.map(String::from).collect::<Vec<_>>()
    };
    let expected = all.iter().map(|one| one.name.clone()).collect::<Vec<_>>();
    let mut shuffled = all.to_vec();
    for _ in 0..all.len() {
        shuffled.rotate_left(1);
        assert_eq!(order(shuffled.clone()), expected);
        let reversed = shuffled.iter().rev().cloned().collect();
        assert_eq!(order(reversed), expected);
    }
}

/// Its object is a pool, as that of an evacuation, but it is neither first nor is it called one.
#[test]
fn a_copy_is_a_line_of_its_own_with_the_pool_that_reports_it() {
    let id = pool(0, "").id;
    let restore = Work {
        resource: "pools",
        is_copy: true,
        namespace: String::new(),
        name: id.clone(),
        what: "restore of claim shop/<b>new</b> from node node-2".into(),
        pools: vec![id.clone()],
        reported: Some(ago(0)),
        ..copy()
    };
    let evacuation = Work {
        resource: "pools",
        what: "evacuation".into(),
        copying_since: None,
        ..copy()
    };
    let world = of(vec![restore.clone(), evacuation]);
    let rows = view(&world, "").work.first;
    assert_eq!(rows[0].what, "evacuation");
    assert_eq!(rows[1].object, format!("pools.slackwater.dev/{id}"));
    assert_eq!(rows[1].left_seconds, Some(30 * 60));
    let text = page(&world, "");
    assert!(
        text.contains("1.0 GiB of 4.0 GiB") && text.contains("about 30 min"),
        "{text}"
    );
    assert!(
        !text.contains("<b>new") && text.contains("shop/&#60;b&#62;new"),
        "{text}"
    );
    assert_eq!(view(&world, "shop/<B>NEW").work.count, 1);
    let values = json(&view(&world, "shop/<b>new")).unwrap();
    assert!(values.contains("\"left_seconds\": 1800"), "{values}");

    let silent = Work {
        reported: Some(ago(4)),
        ..restore.clone()
    };
    let row = view(&of(vec![silent]), "").work.first.remove(0);
    assert_eq!((row.is_stale, row.left_seconds), (true, None));
    let many: Vec<Work> = (0..1000)
        .map(|n| Work {
            what: format!("export of snapshot {n}"),
            ..restore.clone()
        })
        .collect();
    let listed = view(&of(many), "").work;
    assert_eq!((listed.first.len(), listed.count), (20, 1000));
}

#[test]
fn work_is_searched_and_what_is_missing_is_named() {
    let mut world = of(vec![copy(), fill()]);
    let found = view(&world, "SHOP/VM").work;
    assert_eq!((found.count, found.first[0].done_bytes), (1, 4 << 30));
    let none = "No move, revert, evacuation or copy is running";
    assert!(page(&of(Vec::new()), "").contains(none));
    world.work.clear();
    world.work_problem = Some("cannot read HttpSources".into());
    let text = page(&world, "");
    assert!(
        text.contains("Work may be missing: cannot read HttpSources") && !text.contains(none),
        "{text}"
    );
    assert!(
        json(&view(&world, ""))
            .unwrap()
            .contains("\"work_problem\": \"cannot")
    );
}
