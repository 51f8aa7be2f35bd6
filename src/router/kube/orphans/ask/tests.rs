//! Lists that no honest agent sends.

use uuid::Uuid;

use super::*;

fn id(pool: u128, volume: u128) -> String {
    VolumeId {
        pool: PoolId(Uuid::from_u128(pool)),
        uuid: Uuid::from_u128(volume),
    }
    .to_string()
}

fn take(pages: &mut Pages, ids: &[String], next_token: &str) -> Result<(), String> {
    pages.take(ids.iter(), next_token)
}

#[test]
fn a_list_that_does_not_end_is_refused() {
    for (pool, most) in [
        (Some(PoolId(Uuid::from_u128(1))), MAX_ENTRIES),
        (None, MAX_ENTRIES_OF_ALL),
    ] {
        let mut pages = Pages::of(pool);
        let mut entries = 0;
        let refused = loop {
            let next = (1..=PAGE_ENTRIES as u128).map(|n| id(1, entries as u128 + n));
            let page: Vec<_> = next.collect();
            if let Err(why) = take(&mut pages, &page, "more") {
                break why;
            }
            entries += page.len();
            assert!(pages.next_token().is_some());
        };
        assert_eq!(entries, most);
        assert!(refused.contains(&most.to_string()), "{refused}");
    }
}

#[test]
fn a_list_that_repeats_itself_or_names_another_pool_is_refused() {
    let pool = Some(PoolId(Uuid::from_u128(1)));
    for (wrong, token) in [
        (vec![id(1, 2), id(1, 2)], "more"),
        (vec![id(1, 1)], "more"),
        (vec![id(2, 3)], ""),
        (vec!["../etc".to_string()], ""),
        // A page without entries would be asked for again and again.
        (vec![], "more"),
        (
            (0..=PAGE_ENTRIES as u128).map(|n| id(1, n + 3)).collect(),
            "",
        ),
    ] {
        let mut pages = Pages::of(pool);
        take(&mut pages, &[id(1, 1), id(1, 2)], "more").unwrap();
        let refused = take(&mut pages, &wrong, token);
        assert!(refused.is_err(), "{:?}", wrong.first());
    }
    let mut pages = Pages::of(pool);
    take(
        &mut pages,
        &[id(1, 1)],
        "what an agent writes here is not used",
    )
    .unwrap();
    assert_eq!(pages.next_token(), Some(id(1, 1)));
    take(&mut pages, &[id(1, 2)], "").unwrap();
    assert_eq!(pages.next_token(), None);
}
