//! The rules of the decision, one by one and in any order of the claims.

use proptest::prelude::*;

use super::*;

fn on(node: &str) -> Place {
    Place {
        node: node.into(),
        home: format!("home-of-{node}"),
    }
}

fn claim(path: &str, at: At) -> Sibling {
    Sibling {
        path: path.into(),
        is_own: path == "db",
        at,
    }
}

fn new(source: SourceAt) -> At {
    At::Unbound {
        is_ours: Ok(()),
        source,
    }
}

fn restored(node: &str) -> At {
    new(SourceAt::At(on(node)))
}

fn good() -> Candidate {
    Candidate {
        is_allowed: Ok(()),
        fits: Ok(()),
        room: Ok(()),
        is_alone: Ok(()),
    }
}

/// A pod with two restored claims and a new one; its sources are on node "source", which is fine.
fn view() -> View {
    View {
        selected: on("selected"),
        pods: vec!["shop/db-0".into()],
        claims: vec![
            claim("db", restored("source")),
            claim("log", restored("source")),
            claim("tmp", new(SourceAt::None)),
        ],
        candidate: Some(good()),
        room: Ok(()),
    }
}

#[track_caller]
fn goes_to(view: &View, node: &str, why: &str) {
    let decision = decide(view);
    assert_eq!(decision.place, on(node), "{decision:?}");
    assert!(decision.reason.contains(why), "{why}: {decision:?}");
}

#[test]
fn the_node_of_all_sources_is_used_if_nothing_is_against_it() {
    goes_to(&view(), "source", "all sources");
    assert_eq!(decide(&view()).lacks, None);
}

#[test]
fn each_clause_that_does_not_hold_leads_to_the_selected_node() {
    type Change = fn(&mut View);
    let cases: &[(&str, Change)] = &[
        ("no pod uses the claim", |view| view.pods.clear()),
        ("are used by pods shop/db-0 and shop/db-1", |view| {
            view.pods.push("shop/db-1".into());
        }),
        ("are on nodes source and other", |view| {
            view.claims[1].at = restored("other");
        }),
        ("claim log is not known: gone", |view| {
            view.claims[1].at = new(SourceAt::Unknown("gone".into()));
        }),
        ("not ours", |view| {
            view.claims[2].at = At::Unbound {
                is_ours: Err("not ours".into()),
                source: SourceAt::None,
            };
        }),
        ("no claim of the pod has a source", |view| {
            for claim in &mut view.claims {
                claim.at = new(SourceAt::None);
            }
        }),
        ("was not examined", |view| view.candidate = None),
        ("not allowed", |view| {
            view.candidate.as_mut().unwrap().is_allowed = Err("not allowed".into());
        }),
        ("not fit", |view| {
            view.candidate.as_mut().unwrap().fits = Err("not fit".into());
        }),
        ("no room", |view| {
            view.candidate.as_mut().unwrap().room = Err("no room".into());
        }),
        ("not alone", |view| {
            view.candidate.as_mut().unwrap().is_alone = Err("not alone".into());
        }),
    ];
    for (why, change) in cases {
        let mut view = view();
        change(&mut view);
        goes_to(&view, "selected", why);
    }
}

#[test]
fn a_volume_of_the_pod_that_exists_or_is_begun_decides() {
    for (at, why) in [
        (At::Bound(on("third")), "claim log of the same pod is there"),
        (
            At::Begun(on("third")),
            "claim log of the same pod is created there",
        ),
    ] {
        let mut view = view();
        view.claims[1].at = at;
        goes_to(&view, "third", why);
        assert!(!decide(&view).is_repeat);
        // The volume itself cannot be created a second time.
        view.claims[0].at = At::Begun(on("own"));
        goes_to(&view, "own", "begun");
        assert!(decide(&view).is_repeat);
    }
    let mut view = view();
    view.claims[1].at = At::Begun(on("begun"));
    view.claims[2].at = At::Bound(on("bound"));
    goes_to(&view, "bound", "claim tmp");
    view.claims[1].at = At::Anywhere;
    view.claims[2].at = At::Anywhere;
    goes_to(&view, "source", "all sources");
}

#[test]
fn a_selected_node_with_all_sources_needs_no_examination() {
    let mut view = view();
    view.selected = on("source");
    view.candidate = None;
    goes_to(&view, "source", "all sources");
}

#[test]
fn room_for_all_is_demanded_only_before_the_first() {
    let mut view = view();
    view.room = Err("full".into());
    assert_eq!(decide(&view).lacks, None, "of the other node");
    view.candidate = None;
    assert_eq!(decide(&view).lacks.as_deref(), Some("full"));
    view.claims[1].at = At::Begun(on("selected"));
    assert_eq!(decide(&view).lacks, None);
}

fn any_source() -> impl Strategy<Value = SourceAt> {
    prop_oneof![
        2 => Just(SourceAt::None),
        4 => Just(SourceAt::At(on("source"))),
        1 => Just(SourceAt::At(on("other"))),
        1 => Just(SourceAt::Unknown("not readable".into())),
    ]
}

/// Whether each thing that can change between two decisions holds.
fn any_world() -> impl Strategy<Value = [bool; 5]> {
    proptest::array::uniform5(proptest::bool::weighted(0.8))
}

fn seen([allowed, fits, room, alone, selected_room]: [bool; 5]) -> (Candidate, Result<(), String>) {
    let holds = |is_so: bool| is_so.then_some(()).ok_or_else(|| "not now".to_string());
    let candidate = Candidate {
        is_allowed: holds(allowed),
        fits: holds(fits),
        room: holds(room),
        is_alone: holds(alone),
    };
    (candidate, holds(selected_room))
}

proptest! {
    /// In any order of the claims, while all conditions change between decisions. A claim may be
    /// bound before the next one is decided, and a decision may be repeated.
    #[test]
    fn all_claims_of_a_pod_get_the_same_node(
        claims in proptest::collection::vec((any_source(), any::<bool>()), 1..6),
        order in proptest::collection::vec((any::<proptest::sample::Index>(), any_world()), 1..20),
    ) {
        let each = claims.iter().enumerate();
        let mut siblings: Vec<_> = each
            .map(|(n, (source, _))| claim(&n.to_string(), new(source.clone())))
            .collect();
        let mut first = None;
        for (which, world) in order {
            let which = which.index(siblings.len());
            let (candidate, room) = seen(world);
            let mut view = view();
            view.claims.clone_from(&siblings);
            view.claims[which].is_own = true;
            (view.candidate, view.room) = (Some(candidate), room);
            let decision = decide(&view);
            if decision.lacks.is_some() {
                prop_assert_eq!(&first, &None, "only before the first");
                continue;
            }
            let first = first.get_or_insert_with(|| decision.place.clone());
            prop_assert_eq!(&decision.place, first, "{:?}", view);
            siblings[which].at = match claims[which].1 {
                true => At::Bound(decision.place),
                false => At::Begun(decision.place),
            };
        }
    }
}
