//! What images occupy, and what grows.

use super::*;

const GIB: u64 = 1 << 30;

fn counted() -> Option<Images> {
    Some(Images {
        own: 10 * GIB,
        shared: 15 * GIB,
        snapshots: 5 * GIB,
        undivided: 0,
        unmeasured: 0,
        measured: ago(30),
    })
}

/// The names and the ends of the parts of a bar.
fn ends(pool: &Pool) -> Vec<(&'static str, u64)> {
    let mut at = 0;
    let parts = super::super::images::bar(pool).into_iter().map(|part| {
        assert_eq!(part.x, at, "there is no gap");
        at += part.width;
        (part.name, at)
    });
    parts.collect()
}

#[test]
fn the_bar_of_a_pool_is_divided_as_its_images_are() {
    // 40 of 100 GiB are used.
    let with = |images: Option<Images>| Pool {
        images,
        ..pool(0, "node-0")
    };
    assert_eq!(ends(&with(None)), [("other", 400)]);
    let divided = [
        ("own", 100),
        ("shared", 250),
        ("snapshots", 300),
        ("other", 400),
    ];
    assert_eq!(ends(&with(counted())), divided);
    let thin = Images {
        own: 10 * GIB,
        undivided: 25 * GIB,
        ..Images::default()
    };
    let expected = [("own", 100), ("undivided", 350), ("other", 400)];
    assert_eq!(ends(&with(Some(thin))), expected);
    // What was counted was freed since.
    let freed = Images {
        own: 30 * GIB,
        shared: u64::MAX,
        ..Images::default()
    };
    assert_eq!(ends(&with(Some(freed))), [("own", 300), ("shared", 400)]);
}

#[test]
fn the_bytes_of_a_pool_are_in_a_table_with_their_age() {
    let mut world = well(3, 0);
    world.pools[0].images = counted();
    let old = Images {
        measured: ago(200),
        unmeasured: 3,
        undivided: GIB,
        ..counted().unwrap()
    };
    world.pools[1].images = Some(old);
    let shown = view(&world, "");
    assert_eq!(shown.problems.count, 0);
    let of = |node: &str| {
        let mut rows = shown.pools.first.iter();
        rows.find(|row| row.node == node).unwrap().images.as_ref()
    };
    let first = of("node-0").unwrap();
    assert_eq!(
        (first.snapshot_bytes, first.other_bytes),
        (5 * GIB, 10 * GIB)
    );
    assert!(!first.is_stale);
    assert!(of("node-1").unwrap().is_stale, "hours ago");
    assert!(of("node-2").is_none());
    let text = page(&world, "");
    for expected in [
        "(own 10.0 GiB, shared 15.0 GiB, snapshots 5.0 GiB), 50.0 GiB provisioned\"",
        "data-name=\"Shared\">15.0 GiB</td>",
        "data-name=\"One of these\">up to 1.0 GiB</td>",
        ">30 min</time> ago</td>",
        "without 3 volumes",
        "<span class=\"quiet\">not yet</span></td>",
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    world.pools[0].seen = Some(ago(60));
    let stale = view(&world, "node-0").pools.first.remove(0);
    assert!(stale.images.unwrap().is_stale, "the pool is not reported");
}

#[test]
fn the_claims_that_take_most_of_their_pools_are_first() {
    let mut world = well(3, 0);
    world.pools[0].growth = growth(vec![grown("a", 20 * GIB), grown("b", GIB)]);
    // A small pool.
    world.pools[1].total_bytes = 10 * GIB;
    world.pools[1].available_bytes = 9 * GIB;
    let claimed = Grown {
        claim: Some("shop/logs".into()),
        ..grown("c", 3 * GIB)
    };
    world.pools[1].growth = growth(vec![claimed]);
    let shown = view(&world, "");
    let rows = shown.growing.first.iter();
    let rows: Vec<_> = rows
        .map(|row| (&*row.volume, &*row.share, &*row.claim))
        .collect();
    let expected = [
        ("c", "30.0 %", "shop/logs"),
        ("a", "20.0 %", ""),
        ("b", "1.0 %", ""),
    ];
    assert_eq!(rows, expected);
    assert_eq!(shown.pools_without_growth, 1);
    let text = page(&world, "");
    for expected in [
        "Claims that grow pools most (3)",
        "shop/logs</td>",
        "data-name=\"Grew by\">3.0 GiB</td>",
        "Pools of which this is not known: 1.",
        ">10 h</time> ago</td>",
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    // The search finds those of a claim, and of a pool, to which the page links.
    assert_eq!(view(&world, "shop/logs").growing.count, 1);
    assert_eq!(view(&world, &world.pools[0].id).growing.count, 2);
    world.pools[1].is_gone = true;
    world.pools[2].growth = growth(Vec::new());
    assert_eq!(view(&world, "").growing.count, 2);
    assert!(!page(&world, "").contains("is not known:"));
    world.pools[0].growth.as_mut().unwrap().measured = ago(200);
    assert!(view(&world, "").growing.first[0].is_stale);
}
