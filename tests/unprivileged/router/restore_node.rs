//! The node of restored and new volumes of one pod, with the class parameter `restore: auto`, the default.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use slackwater::csi::*;
use slackwater::operation::ContentSource;
use slackwater::router::cluster::ObjectRef;
use slackwater::router::create_volume::pod_placement::{
    Claim, Class, PodClaims, Source, State, Tie,
};
use tonic::Code;

use crate::router::cluster::*;
use crate::service::harness::*;

/// A pod in a cluster of two nodes. Its first claim is restored from a snapshot on node-a, its
/// second one is new, and node-b is selected for it.
struct Case {
    a: AgentNode,
    b: AgentNode,
    routed: TestRouter,
    snapshot: String,
}

const RESTORED: &str = "restored";
const NEW: &str = "new";

fn claim(name: &str, state: State) -> Claim {
    Claim {
        path: format!("shop/{name}"),
        uid: name.into(),
        selected: Some("node-b".into()),
        bytes: GIB as u64,
        state,
    }
}

fn unbound(source: Source) -> State {
    let class = Class::Ours(BTreeMap::new());
    State::Unbound { class, source }
}

impl Case {
    async fn new() -> Case {
        let a = AgentNode::start("node-a", &["default"], Some(200 * GIB as u64));
        let b = AgentNode::start("node-b", &["default"], Some(20 * GIB as u64));
        let routed = TestRouter::of(&[&a, &b]).await;
        let id = routed.create_on("v", &a).await;
        let mut client = routed.controller();
        let created = client.create_snapshot(snapshot("s", &id)).await;
        let created = created.unwrap().into_inner();
        let snapshot = created.snapshot.unwrap().snapshot_id;
        let mut pod = Pod::default();
        pod.metadata.name = Some("db-0".into());
        pod.metadata.namespace = Some("shop".into());
        routed.kubernetes.update(|state| {
            for name in [RESTORED, NEW] {
                state
                    .selected
                    .insert(format!("shop/{name}"), "node-b".into());
            }
            state.pod_claims = PodClaims {
                claims: vec![
                    claim(
                        RESTORED,
                        unbound(Source::Of(ContentSource::Snapshot(snapshot.clone()))),
                    ),
                    claim(NEW, unbound(Source::None)),
                ],
                pods: vec![pod],
                ..PodClaims::default()
            };
        });
        Case {
            a,
            b,
            routed,
            snapshot,
        }
    }

    fn pods(&self, change: impl FnOnce(&mut PodClaims)) {
        self.routed
            .kubernetes
            .update(|state| change(&mut state.pod_claims));
    }

    /// The next examination of a node finds this.
    fn against(&self, why: &str) {
        let kubernetes = &self.routed.kubernetes;
        kubernetes.update(|state| state.against.push(why.into()));
    }

    fn request(&self, name: &str) -> CreateVolumeRequest {
        let homes = [&*self.b.home(), &*self.a.home()];
        let mut request = claimed(
            at(create(&format!("pvc-{name}")), &homes),
            &format!("shop/{name}"),
        );
        if name == RESTORED {
            request.volume_content_source = Some(VolumeContentSource {
                r#type: Some(from_snapshot(&self.snapshot)),
            });
        }
        request
    }

    async fn goes_to(&self, name: &str, node: &AgentNode) {
        let created = self.routed.create(self.request(name)).await.unwrap();
        assert_eq!(home_of(&created), node.home(), "{name}");
    }

    /// The snapshot would be copied to node-b, but without certificates the agent of node-a does not
    /// send it.
    async fn is_copied(&self) {
        let created = self.routed.create(self.request(RESTORED)).await;
        refused(created, Code::Unavailable, &["node-a"]);
    }

    /// The same, and an event has the reason.
    async fn is_copied_because(&self, why: &str) {
        self.is_copied().await;
        self.routed.kubernetes.update(|state| {
            let last = state.messages.last().unwrap();
            assert!(last.contains("node-b") && last.contains(why), "{last}");
        });
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn all_volumes_of_a_pod_are_created_beside_the_sources() {
    for order in [[RESTORED, NEW], [NEW, RESTORED]] {
        let case = Case::new().await;
        case.goes_to(order[0], &case.a).await;
        // Whatever changes afterwards, the other one follows.
        case.against("node node-a is cordoned");
        case.goes_to(order[1], &case.a).await;
        case.goes_to(order[0], &case.a).await;
        case.routed.kubernetes.update(|state| {
            for name in order {
                let event = (ObjectRef::Claim(format!("shop/{name}")), "NodeChosen");
                let count = state
                    .reported
                    .iter()
                    .filter(|reported| **reported == event)
                    .count();
                assert_eq!(count, 1, "one event for each claim: {:?}", state.reported);
            }
        });
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_that_are_created_at_once_get_the_same_node() {
    for _ in 0..5 {
        let case = Case::new().await;
        // The node is fine for one of them only.
        case.against("node node-a is cordoned");
        case.pods(|pods| pods.claims.push(claim("log", unbound(Source::None))));
        let kubernetes = &case.routed.kubernetes;
        kubernetes.update(|state| {
            state.selected.insert("shop/log".into(), "node-b".into());
        });
        let (new, log) = tokio::join!(
            case.routed.create(case.request(NEW)),
            case.routed.create(case.request("log")),
        );
        let (new, log) = (new.unwrap(), log.unwrap());
        assert_eq!(home_of(&new), home_of(&log));
        assert_eq!(home_of(&new), case.b.home());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn with_source_a_restore_goes_to_its_source_and_a_new_volume_to_the_selected_node() {
    let case = Case::new().await;
    for (name, node) in [(RESTORED, &case.a), (NEW, &case.b)] {
        let mut request = case.request(name);
        request.parameters.insert("restore".into(), "source".into());
        request
            .parameters
            .insert("onNodeLost".into(), "recreate".into());
        let created = case.routed.create(request).await.unwrap();
        assert_eq!(home_of(&created), node.home());
    }
    for parameter in ["restore", "onNodeLost"] {
        let mut request = case.request(NEW);
        request.parameters.insert(parameter.into(), "here".into());
        refused(
            case.routed.create(request).await,
            Code::InvalidArgument,
            &[parameter, "here"],
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_cannot_run_beside_the_sources_stays_on_the_selected_node() {
    let case = Case::new().await;
    case.against("node node-a is cordoned");
    case.is_copied_because("node-a is cordoned").await;
    case.against("node node-a is cordoned");
    case.goes_to(NEW, &case.b).await;
    // The new volume decides from now on.
    case.is_copied_because("claim shop/new of the same pod")
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_volume_of_the_same_controller_keeps_the_pod_away() {
    let case = Case::new().await;
    let home = case.a.home();
    let other = claim("db-1", State::Bound(Tie::Home(home)));
    case.pods(|pods| pods.others = vec![other]);
    case.is_copied_because("claim shop/db-1 of the same controller has its volume")
        .await;
    let mut other = claim("db-1", unbound(Source::None));
    other.selected = Some("node-a".into());
    case.pods(|pods| pods.others = vec![other.clone()]);
    case.is_copied_because("claim shop/db-1 of the same controller gets its volume")
        .await;
    // It is not bound yet, and its volume exists.
    other.selected = None;
    case.pods(|pods| pods.others = vec![other.clone()]);
    case.routed.create_on("pvc-db-1", &case.a).await;
    case.is_copied_because("claim shop/db-1 of the same controller gets its volume")
        .await;
    case.pods(|pods| pods.others.clear());
    case.goes_to(RESTORED, &case.a).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unbound_claims_of_other_kinds_keep_the_pod_on_the_selected_node() {
    let case = Case::new().await;
    let class = |class: Class| {
        let source = Source::None;
        claim("other", State::Unbound { class, source })
    };
    let pod = [("restore".to_string(), "pod".to_string())].into();
    let unknown = unbound(Source::Unknown("it is not ready".into()));
    for (other, why) in [
        (class(Class::Others), "not created by this driver"),
        (class(Class::Unknown("it is gone".into())), "it is gone"),
        (class(Class::Ours(pod)), "restore: auto"),
        (claim("other", unknown), "it is not ready"),
    ] {
        case.pods(|pods| {
            pods.claims.truncate(2);
            pods.claims.push(other);
        });
        case.is_copied_because(why).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn room_for_all_volumes_is_demanded_before_the_first() {
    let case = Case::new().await;
    case.pods(|pods| pods.claims[1].bytes = 150 * GIB as u64);
    case.goes_to(RESTORED, &case.a).await;
    let case = Case::new().await;
    // Neither node has room for this.
    case.pods(|pods| pods.claims[1].bytes = 500 * GIB as u64);
    for name in [NEW, RESTORED] {
        let created = case.routed.create(case.request(name)).await;
        refused(created, Code::ResourceExhausted, &["node-b", "need"]);
    }
    assert_eq!(case.b.driver.pool_status()[0].volumes, 0);
    assert_eq!(case.a.driver.pool_status()[0].volumes, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_may_have_a_volume_of_the_pod_must_answer() {
    let mut case = Case::new().await;
    case.a.kill();
    case.routed.until("node-a", false).await;
    for name in [NEW, RESTORED] {
        let created = case.routed.create(case.request(name)).await;
        refused(created, Code::Unavailable, &["node-a"]);
    }
    assert_eq!(case.b.driver.pool_status()[0].volumes, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_agent_of_a_selected_node_must_answer_as_long_as_the_node_exists() {
    let mut case = Case::new().await;
    case.b.kill();
    case.routed.until("node-b", false).await;
    let created = case.routed.create(case.request(RESTORED)).await;
    refused(created, Code::Unavailable, &["node-b"]);
    case.routed.kubernetes.update(|state| {
        state.gone.insert("node-b".into());
    });
    for name in [NEW, RESTORED] {
        let created = case.routed.create(case.request(name)).await;
        refused(created, Code::ResourceExhausted, &["node-b is no longer"]);
    }
    assert_eq!(case.a.driver.pool_status()[0].volumes, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_without_a_pod_or_without_a_selected_node_needs_no_examination() {
    let case = Case::new().await;
    case.pods(|pods| pods.pods.clear());
    case.is_copied_because("no pod uses the claim").await;
    case.goes_to(NEW, &case.b).await;
    case.routed
        .kubernetes
        .update(|state| state.selected.clear());
    case.goes_to(RESTORED, &case.a).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_was_begun_for_a_deleted_claim_is_continued_there() {
    // This one has no source, so the agent of its node refuses it.
    async fn continued(case: &Case) {
        let created = case.routed.create(case.request(RESTORED)).await;
        refused(created, Code::AlreadyExists, &["pvc-restored"]);
    }
    let case = Case::new().await;
    case.routed.create_on("pvc-restored", &case.b).await;
    continued(&case).await;
    case.routed.kubernetes.update(|state| {
        state.selected.clear();
        state.pod_claims.pods.clear();
        state.pod_claims.claims.truncate(1);
        state.pod_claims.claims[0].uid.clear();
    });
    continued(&case).await;
}

/// A clone is decided like a restore.
#[tokio::test(flavor = "multi_thread")]
async fn a_clone_goes_beside_its_source_if_the_pod_can_run_there_and_else_to_the_selected_node() {
    for can_run in [true, false] {
        let case = Case::new().await;
        let source = case.routed.create_on("source", &case.a).await;
        case.pods(|pods| {
            pods.claims[0].state = unbound(Source::Of(ContentSource::Volume(source.clone())));
        });
        if !can_run {
            case.against("node node-a is cordoned");
        }
        let mut request = case.request(RESTORED);
        request.volume_content_source = Some(VolumeContentSource {
            r#type: Some(from_volume(&source)),
        });
        let created = case.routed.create(request).await;
        match can_run {
            true => {
                assert_eq!(home_of(&created.unwrap()), case.a.home());
                case.goes_to(NEW, &case.a).await;
            }
            // It would be copied, but without certificates the agent of node-a does not send it.
            false => refused(created, Code::Unavailable, &["node-a"]),
        }
    }
}
