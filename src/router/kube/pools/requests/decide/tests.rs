//! Requests in every state of the nodes, as their agents report it.

use super::*;
use crate::router::kube::pools::object::PoolStatus;

/// What an agent says of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Says {
    /// The node has no agent.
    NoAgent,
    /// The agent was not asked yet.
    Unasked,
    /// It cannot be reached, and has not answered for long.
    Silent,
    /// It cannot be reached since a moment ago, and has served the pool.
    JustSilent,
    /// It does not report the pool.
    Nothing,
    Serves,
    Absent,
    OtherHome,
    /// It does not say why the pool is not served, as agents of earlier releases.
    Refuses,
    Forgotten,
}

const ALL: [Says; 10] = [
    Says::NoAgent,
    Says::Unasked,
    Says::Silent,
    Says::JustSilent,
    Says::Nothing,
    Says::Serves,
    Says::Absent,
    Says::OtherHome,
    Says::Refuses,
    Says::Forgotten,
];

fn time(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_700_000_000 + seconds).unwrap()
}

fn id(n: u128) -> PoolId {
    PoolId(uuid::Uuid::from_u128(n))
}

fn report(node: &str, says: Says) -> Option<Report> {
    let shown = |refusal: &str, presence: Presence| Shown {
        id: id(1).to_string(),
        refusal: refusal.into(),
        presence: presence.into(),
        forgotten: says == Says::Forgotten,
        ..Shown::default()
    };
    let other = Shown {
        id: id(2).to_string(),
        ..Shown::default()
    };
    let its = match says {
        Says::Serves | Says::Silent | Says::JustSilent => Some(shown("", Presence::Unknown)),
        Says::Absent => Some(shown("its disk is missing", Presence::Absent)),
        Says::OtherHome => Some(shown("it belongs to another home", Presence::OtherHome)),
        Says::Refuses | Says::Forgotten => Some(shown("for some reason", Presence::Unknown)),
        Says::NoAgent | Says::Unasked | Says::Nothing => None,
    };
    let answer = DescribeResponse {
        node_name: node.into(),
        pools: [other].into_iter().chain(its).collect(),
        ..DescribeResponse::default()
    };
    let (at, problem) = match says {
        Says::NoAgent => return None,
        Says::Silent => (Some(time(-300)), Some("connection refused")),
        Says::JustSilent => (Some(time(-5)), Some("connection refused")),
        Says::Unasked => (None, None),
        _ => (Some(time(-1)), None),
    };
    Some(Report {
        node: node.into(),
        seen: at.map(|at| (at, Arc::new(answer))),
        problem: problem.map(str::to_string),
        is_refused: false,
    })
}

fn seen(request: PoolRequest, node: &str, owner: &str, says: &[(&str, Says)]) -> Seen {
    let reports = says.iter().filter_map(|(node, says)| report(node, *says));
    let mut pool = Pool::new(id(1), "csi.example");
    match request {
        PoolRequest::Adopt => pool.spec.adopt = Some(node.into()),
        PoolRequest::Forget => pool.spec.forget = Some(node.into()),
    }
    let its = says.iter().find(|(name, _)| *name == owner);
    let is_away = its.is_none_or(|(_, says)| matches!(says, Says::Silent | Says::NoAgent));
    pool.status = Some(PoolStatus {
        node: owner.into(),
        health: match is_away {
            true => Health::Unreachable,
            false => Health::NotServed,
        },
        ..PoolStatus::default()
    });
    Seen {
        id: id(1),
        request,
        node: node.into(),
        pool,
        look: Arc::new(Look {
            reports: reports.collect(),
            nodes: ["a", "b", "c"].map(str::to_string).into(),
            silent_since: time(-30),
        }),
    }
}

/// Node b is to adopt the pool of node a.
fn adopting(a: Says, b: Says, c: Says) -> Seen {
    seen(
        PoolRequest::Adopt,
        "b",
        "a",
        &[("a", a), ("b", b), ("c", c)],
    )
}

fn reason(seen: &Seen) -> &'static str {
    match decide(seen) {
        Decision::Wait(reason, message) => {
            assert!(!message.is_empty(), "{reason}");
            reason
        }
        Decision::Ask => "ask",
        Decision::Complete { hand_over: true } => "hand over",
        Decision::Complete { hand_over: false } => "complete",
    }
}

#[test]
fn a_pool_is_adopted_and_then_handed_over() {
    for gone in [Says::Silent, Says::NoAgent, Says::Absent, Says::Nothing] {
        let mut seen = adopting(gone, Says::OtherHome, Says::Nothing);
        assert_eq!(reason(&seen), "ask", "{gone:?}");
        seen.look = adopting(gone, Says::Serves, Says::Nothing).look;
        assert_eq!(reason(&seen), "hand over", "{gone:?}");
        // Another router has died before it removed the field, or a person has handed the pool over.
        seen.pool.spec.node = Some("b".into());
        assert_eq!(reason(&seen), "complete", "{gone:?}");
        seen.pool.spec.node = None;
        seen.pool.status.as_mut().unwrap().node = "b".into();
        assert_eq!(reason(&seen), "complete", "{gone:?}");
    }
}

#[test]
fn a_pool_without_another_node_is_adopted_where_it_is() {
    for owner in ["b", ""] {
        let says = [("a", Says::Nothing), ("b", Says::OtherHome)];
        let seen = seen(PoolRequest::Adopt, "b", owner, &says);
        assert_eq!(reason(&seen), "ask", "{owner}");
    }
}

/// In all states: no request and no hand-over while another node serves the pool, or may have it.
#[test]
fn a_pool_that_another_node_may_have_is_never_adopted() {
    let mut decided = std::collections::BTreeMap::<_, usize>::new();
    for a in ALL {
        for b in ALL {
            for c in ALL {
                let seen = adopting(a, b, c);
                let found = reason(&seen);
                *decided.entry(found).or_default() += 1;
                let is_away = |says| {
                    let away = [Says::Silent, Says::NoAgent, Says::Absent, Says::Nothing];
                    away.contains(&says) || says == Says::Forgotten
                };
                let serves = |says| matches!(says, Says::Serves | Says::JustSilent);
                let may = is_away(a) && !serves(c) && c != Says::Unasked;
                let expected = match b {
                    Says::OtherHome if may => "ask",
                    Says::Serves if may => "hand over",
                    _ => found,
                };
                assert_eq!(found, expected, "{a:?} {b:?} {c:?}");
                let is_done = ["ask", "hand over", "complete"].contains(&found);
                let is_right = may && matches!(b, Says::OtherHome | Says::Serves);
                assert_eq!(is_done, is_right, "{a:?} {b:?} {c:?}: {found}");
            }
        }
    }
    for reason in [
        "Unreachable",
        "Unknown",
        "Served",
        "NotMissing",
        "NotPresent",
        "NotReported",
    ] {
        assert!(decided.contains_key(reason), "{reason}: {decided:?}");
    }
}

#[test]
fn the_spec_and_the_health_of_a_pool_can_be_against_its_adoption() {
    let ready = || adopting(Says::Silent, Says::OtherHome, Says::Nothing);
    let with = |change: fn(&mut Pool)| {
        let mut seen = ready();
        change(&mut seen.pool);
        reason(&seen)
    };
    assert_eq!(with(|pool| pool.spec.lost = true), "Lost");
    assert_eq!(with(|pool| pool.spec.node = Some("c".into())), "HandedOver");
    let conflict = |pool: &mut Pool| pool.status.as_mut().unwrap().health = Health::Conflict;
    assert_eq!(with(conflict), "Conflict");
    // The agent is silent, but that is not long enough ago for the status of the pool.
    let early = |pool: &mut Pool| pool.status.as_mut().unwrap().health = Health::Healthy;
    assert_eq!(with(early), "Unknown");
    let mut seen = ready();
    seen.node = "d".into();
    assert_eq!(reason(&seen), "NoNode");
}

/// Whatever a node other than the one in the spec reports, nothing is asked of it.
#[test]
fn only_the_node_in_the_spec_is_asked() {
    for c in [
        Says::OtherHome,
        Says::Absent,
        Says::Refuses,
        Says::Forgotten,
    ] {
        let seen = adopting(Says::Silent, Says::Nothing, c);
        assert_eq!(reason(&seen), "NotReported", "{c:?}");
    }
}

fn forgetting(says: Says) -> Seen {
    seen(PoolRequest::Forget, "a", "a", &[("a", says)])
}

#[test]
fn a_node_is_asked_to_forget_a_pool_until_it_reports_that() {
    for says in ALL {
        let expected = match says {
            Says::NoAgent | Says::Silent | Says::JustSilent => "Unreachable",
            Says::Unasked => "Unknown",
            Says::Serves | Says::OtherHome => "Present",
            Says::Absent | Says::Refuses | Says::Nothing => "ask",
            // Otherwise the removal of the field would be taken for the end of a pool that is still Unreachable.
            Says::Forgotten => "Completing",
        };
        assert_eq!(reason(&forgetting(says)), expected, "{says:?}");
    }
    for health in [Health::Forgotten, Health::Lost] {
        let mut seen = forgetting(Says::Forgotten);
        seen.pool.status.as_mut().unwrap().health = health;
        assert_eq!(reason(&seen), "complete", "{health:?}");
    }
    let says = [("a", Says::Forgotten), ("b", Says::Serves)];
    let elsewhere = seen(PoolRequest::Forget, "a", "b", &says);
    assert_eq!(reason(&elsewhere), "complete");
}

/// Its volumes would count as deleted while the pool belongs to the node that forgets it.
#[test]
fn a_pool_is_not_forgotten_before_it_was_adopted() {
    let mut seen = forgetting(Says::Absent);
    seen.pool.spec.adopt = Some("b".into());
    assert_eq!(reason(&seen), "Adopting");
    seen.pool.spec.adopt = None;
    seen.pool.spec.node = Some("b".into());
    assert_eq!(reason(&seen), "Adopting");
}
