//! Volumes that are copied from a snapshot of another node: callers that repeat, copies that are not
//! wanted any more, and agents that lie.

use std::path::Path;
use std::time::{Duration, Instant};

use slackwater::agent::{DescribeResponse, OfferResponse};
use slackwater::csi::*;
use slackwater::model::{AccessMode, AccessType, Capability, FsType};
use slackwater::operation::StageVolume;
use tonic::{Code, Request, Status};

use crate::router::cluster::*;
use crate::router::fake;
use crate::router::liar::{Kind, Liar, Lie, LieKind};
use crate::service::gate::Opens;
use crate::service::harness::*;

pub const CLAIM: &str = "shop/db";
pub const TOKENS: [u64; 3] = [11, 12, 13];
/// A deadline that no call reaches.
pub const LONG: Duration = Duration::from_secs(120);

/// A volume of few ranges.
pub fn sized(name: &str) -> CreateVolumeRequest {
    CreateVolumeRequest {
        capacity_range: at_least(64 * MIB),
        ..create(name)
    }
}

/// A snapshot on node-a, which is to be restored on node-b.
pub struct Case {
    pub a: AgentNode,
    pub b: AgentNode,
    pub routed: TestRouter,
    /// The volume on node-a, and a snapshot of it.
    pub volume: String,
    snapshot: String,
}

fn stage_with<T>(
    node: &AgentNode,
    volume_id: &str,
    act: impl FnOnce(&Path) -> T,
) -> slackwater::error::Result<T> {
    let volumes = &node.driver.volumes;
    volumes.stage_volume(&StageVolume {
        volume_id: volume_id.into(),
        staging_path: STAGING.into(),
        capability: Capability {
            access_type: AccessType::Mount {
                fs_type: Some(FsType::Ext4),
                mount_flags: Vec::new(),
            },
            access_mode: AccessMode::SingleNodeWriter,
        },
    })?;
    let result = act(Path::new(STAGING));
    volumes.unstage_volume(volume_id, STAGING)?;
    Ok(result)
}

impl Case {
    pub async fn new() -> Case {
        let a = AgentNode::with_peers("node-a", &["default"], None);
        let b = AgentNode::with_peers("node-b", &["default"], None);
        let routed = TestRouter::of(&[&a, &b]).await;
        let volume = routed.create(at(sized("v"), &[&a.home()])).await;
        let id = volume.unwrap().volume_id;
        stage_with(&a, &id, |at| {
            for token in TOKENS {
                a.machine.write_token(at, token).unwrap();
            }
        })
        .unwrap();
        let mut client = routed.controller();
        let created = client.create_snapshot(snapshot("s", &id)).await;
        let snapshot = created.unwrap().into_inner().snapshot.unwrap().snapshot_id;
        routed.kubernetes.update(|state| {
            state.selected.insert(CLAIM.into(), "node-b".into());
        });
        Case {
            a,
            b,
            routed,
            volume: id,
            snapshot,
        }
    }

    fn request(&self, parameters: &[(&str, &str)]) -> CreateVolumeRequest {
        let homes = [&*self.b.home(), &*self.a.home()];
        let mut request = claimed(at(sized("copy"), &homes), CLAIM);
        let parameters = parameters.iter().copied();
        request
            .parameters
            .extend(parameters.map(|(key, value)| (key.to_string(), value.to_string())));
        request.parameters.insert("restore".into(), "pod".into());
        request.volume_content_source = Some(VolumeContentSource {
            r#type: Some(from_snapshot(&self.snapshot)),
        });
        request
    }

    /// A call with this deadline, in a task of its own.
    fn call(
        &self,
        parameters: &[(&str, &str)],
        deadline: Duration,
    ) -> tokio::task::JoinHandle<Result<Volume, Status>> {
        let mut client = self.routed.controller();
        let mut request = Request::new(self.request(parameters));
        request.set_timeout(deadline);
        tokio::spawn(async move {
            let created = client.create_volume(request).await?;
            Ok(created.into_inner().volume.unwrap())
        })
    }

    async fn restore(&self) -> Result<Volume, Status> {
        self.call(&[], LONG).await.unwrap()
    }

    /// The files of volumes on node-b, the deleted ones included.
    pub fn left(&self) -> Vec<String> {
        let root = Path::new("/memory/default");
        let parts = ["volumes", "trash"].map(|part| root.join(part));
        let left = parts
            .iter()
            .flat_map(|part| self.b.machine.files_below(part));
        left.collect()
    }

    /// The restored volume is on node-b, with the content of the snapshot.
    pub fn check(&self, volume: &Volume) {
        assert_eq!(self.content(volume).unwrap(), TOKENS);
    }

    pub fn content(&self, volume: &Volume) -> slackwater::error::Result<Vec<u64>> {
        assert_eq!(home_of(volume), self.b.home());
        for node in [&self.a, &self.b] {
            assert_eq!(node.machine.violations(), [""; 0]);
        }
        stage_with(&self.b, &volume.volume_id, |at| {
            self.b.machine.tokens(at).unwrap()
        })
    }

    /// A copy that waits at its first write, and the call for it.
    async fn running(&self) -> (Opens, tokio::task::JoinHandle<Result<Volume, Status>>) {
        let opens = Opens(self.b.gate.clone());
        self.b.gate.close("write_range");
        let call = self.call(&[], LONG);
        self.b.gate.reached(1).await;
        (opens, call)
    }

    /// A copy that ended before its end because its source was away.
    async fn begun(&mut self) {
        let opens = Opens(self.b.gate.clone());
        // After this, the target asks the source.
        self.b.gate.close("make_dir");
        let call = self.call(&[], LONG);
        self.b.gate.reached(1).await;
        self.a.kill();
        drop(opens);
        refused(call.await.unwrap(), Code::Unavailable, &["node-a"]);
        assert!(!self.left().is_empty(), "a repeat continues it");
        self.a.revive();
        self.routed.until("node-a", true).await;
    }

    /// The agent of node-a reports another port for snapshots.
    async fn reports_port(&mut self, port: u16) {
        self.a.reported_port = Some(port);
        self.a.revive();
        let is_so = |reported: &DescribeResponse| reported.peer_port == u32::from(port);
        self.routed.until_described("node-a", is_so).await;
    }

    pub fn assert_nothing_left(&self) {
        let left = self.left();
        assert!(left.is_empty(), "{left:?}");
    }

    pub fn update(&self, change: impl FnOnce(&mut KubernetesState)) {
        self.routed.kubernetes.update(change);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeat_joins_the_copy_until_its_own_deadline() {
    let case = Case::new().await;
    let (opens, first) = case.running().await;
    // The last five seconds of a deadline are not waited for.
    let start = Instant::now();
    let answer = case.call(&[], Duration::from_secs(7)).await.unwrap();
    refused(answer, Code::Aborted, &["copy"]);
    let waited = start.elapsed();
    assert!(waited >= Duration::from_secs(2), "{waited:?}");
    assert!(waited < Duration::from_secs(7), "{waited:?}");
    let second = case.call(&[], LONG);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!first.is_finished() && !second.is_finished());
    drop(opens);
    let (first, second) = (first.await.unwrap().unwrap(), second.await.unwrap());
    assert_eq!(second.unwrap(), first);
    case.check(&first);
    assert_eq!(case.restore().await.unwrap(), first, "a repeat");
}

/// A change of the cluster after which a copy is not wanted any more, the code, and a word of the
/// message.
pub type Change = (fn(&mut KubernetesState), Code, &'static str);

pub const CHANGES: [Change; 3] = [
    (
        |state| {
            state.cordoned.insert("node-b".into());
        },
        Code::ResourceExhausted,
        "cordoned",
    ),
    (
        |state| {
            state.gone.insert("node-b".into());
        },
        Code::ResourceExhausted,
        "no longer in the cluster",
    ),
    (
        |state| {
            state.deleted.insert(CLAIM.into());
        },
        Code::FailedPrecondition,
        "claim shop/db was deleted",
    ),
];

pub fn undo_changes(state: &mut KubernetesState) {
    state.cordoned.clear();
    state.gone.clear();
    state.deleted.clear();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_whose_node_or_claim_is_gone_while_it_runs_is_undone_before_the_answer() {
    let case = Case::new().await;
    for (change, code, word) in CHANGES {
        let (opens, call) = case.running().await;
        case.update(change);
        // The router has seen it, and the copy is still in its first step.
        tokio::time::sleep(Duration::from_secs(6)).await;
        assert!(!call.is_finished(), "{word}");
        assert!(!case.left().is_empty(), "{word}");
        drop(opens);
        refused(call.await.unwrap(), code, &[word]);
        case.assert_nothing_left();
        case.update(undo_changes);
    }
    case.check(&case.restore().await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_earlier_call_has_copied_is_undone_as_well() {
    let mut case = Case::new().await;
    for (change, code, word) in CHANGES {
        case.begun().await;
        case.update(change);
        refused(case.restore().await, code, &[word]);
        case.assert_nothing_left();
        // It does not begin again either.
        refused(case.restore().await, code, &[word]);
        case.assert_nothing_left();
        case.update(undo_changes);
    }
    // What was refused is final for the agent as well: the class does not match the source.
    case.begun().await;
    let answer = case.call(&[("blockSize", "4096")], LONG).await.unwrap();
    refused(answer, Code::InvalidArgument, &["blockSize"]);
    case.assert_nothing_left();
    case.begun().await;
    case.check(&case.restore().await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_is_complete_is_returned_whatever_has_changed() {
    let case = Case::new().await;
    let made = case.restore().await.unwrap();
    for (change, _, word) in CHANGES {
        case.update(change);
        let answer = case.restore().await;
        match word.contains("cluster") {
            // The scheduler has to select a node that exists.
            true => refused(answer, Code::ResourceExhausted, &[word]),
            false => assert_eq!(answer.unwrap(), made, "{word}"),
        }
        case.update(undo_changes);
    }
    case.check(&made);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_gone_with_its_agent_does_not_hold_up_the_answer() {
    let mut case = Case::new().await;
    case.begun().await;
    case.b.kill();
    case.routed.until("node-b", false).await;
    case.update(|state| {
        state.gone.insert("node-b".into());
    });
    refused(case.restore().await, Code::ResourceExhausted, &["node-b"]);
    // If it only cannot be reached, that is not known.
    case.update(undo_changes);
    refused(case.restore().await, Code::Unavailable, &["node-b"]);
    case.b.revive();
    case.routed.until("node-b", true).await;
    case.check(&case.restore().await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_that_is_full_is_named_and_nothing_is_left() {
    let case = Case::new().await;
    let (opens, call) = case.running().await;
    case.b
        .machine
        .fail_always("write_range", Some(nix::errno::Errno::ENOSPC));
    drop(opens);
    refused(call.await.unwrap(), Code::ResourceExhausted, &["node-b"]);
    case.assert_nothing_left();
    case.b.machine.clear_faults();
    case.check(&case.restore().await.unwrap());
}

impl Case {
    /// A copy fails with a code after which it is repeated or made elsewhere, or has the content of
    /// the snapshot. Returns whether it was made.
    async fn is_never_wrong(&self, context: &str) -> bool {
        let made = match self.restore().await {
            Ok(made) => made,
            Err(status) => {
                let is_expected = matches!(
                    status.code(),
                    Code::Unavailable | Code::ResourceExhausted | Code::OutOfRange | Code::Internal
                );
                assert!(is_expected, "{context}: {status:?}");
                return false;
            }
        };
        // What is not formatted according to its source, and is, is not mounted.
        if let Ok(content) = self.content(&made) {
            assert_eq!(content, TOKENS, "{context}");
        }
        self.delete(&made).await;
        true
    }

    async fn delete(&self, volume: &Volume) {
        let mut client = self.routed.controller();
        let deleted = client.delete_volume(delete(&volume.volume_id)).await;
        deleted.unwrap();
    }

    /// Lets a liar answer for each field of the answers of a method in turn.
    async fn hears_lies(&self, liar: &Liar, method: &str) {
        let made = self.restore().await.unwrap();
        self.delete(&made).await;
        let fields = liar.fields().remove(method).expect(method);
        let (mut reported, mut refused) = (0, 0);
        for (field, kind) in fields.iter().enumerate() {
            let other: &[LieKind] = match kind {
                Kind::Text => &[LieKind::Text(String::new())],
                Kind::Number => &[
                    LieKind::Number(0),
                    LieKind::Number(7),
                    LieKind::Number(4096),
                    LieKind::Number(3 << 30),
                    LieKind::Number(u64::MAX),
                ],
                Kind::Other => &[],
            };
            let common = [LieKind::Dropped, LieKind::Twice];
            for what in common.iter().chain(other) {
                let lie = Lie {
                    method: method.into(),
                    field,
                    what: what.clone(),
                };
                let context = format!("{lie:?}");
                liar.set_lie(Some(lie));
                let is_made = self.is_never_wrong(&context).await;
                reported += usize::from(liar.times_applied() > 0);
                refused += usize::from(!is_made);
                liar.set_lie(None);
                if !is_made {
                    let made = self.restore().await.unwrap();
                    self.check(&made);
                    self.delete(&made).await;
                }
            }
        }
        assert!(
            reported > fields.len() && refused > 0,
            "{reported} lies, {refused} noticed"
        );
        self.check(&self.restore().await.unwrap());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_lies_about_the_data_never_gives_wrong_content() {
    let mut case = Case::new().await;
    let (liar, lying) = Liar::before(case.a.peer_address.unwrap());
    case.reports_port(lying.address.port()).await;
    case.hears_lies(&liar, "Read").await;
    // A message that is none.
    liar.set_lie(Some(Lie {
        method: "Read".into(),
        field: 0,
        what: LieKind::Forged(vec![0xff; 3]),
    }));
    let made = case.restore().await;
    // It was complete before.
    case.check(&made.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_lies_about_its_offer_never_gives_wrong_content() {
    let case = Case::new().await;
    let (liar, lying) = Liar::before(case.a.address);
    case.routed
        .set(&[("node-a", lying.address), ("node-b", case.b.address)])
        .await;
    case.hears_lies(&liar, "Offer").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_ticket_for_another_reader_is_refused() {
    let case = Case::new().await;
    // The source believes that the caller is no node at all.
    let (liar, lying) = Liar::before(case.a.address);
    case.routed
        .set(&[("node-a", lying.address), ("node-b", case.b.address)])
        .await;
    let mut offer = case
        .a
        .driver
        .snapshots
        .offer(&case.snapshot, "node-c", &[])
        .unwrap();
    offer.ticket.0[0] ^= 1;
    let forged = OfferResponse {
        offer: Some(slackwater::agent::SnapshotOffer {
            ticket: offer.ticket.0.to_vec(),
            identity: offer.identity,
            size_bytes: offer.size,
            image_bytes: offer.image_bytes,
            block_size: offer.block_size,
            formatted: String::new(),
            base_identities: Vec::new(),
        }),
    };
    liar.set_lie(Some(Lie {
        method: "Offer".into(),
        field: 0,
        what: LieKind::Forged(prost::Message::encode_to_vec(&forged)),
    }));
    let words = ["node-a", "the ticket"];
    refused(case.restore().await, Code::Unavailable, &words);
    liar.set_lie(None);
    case.check(&case.restore().await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_that_lies_is_named() {
    let case = Case::new().await;
    let (liar, lying) = Liar::before(case.b.address);
    case.routed
        .set(&[("node-a", case.a.address), ("node-b", lying.address)])
        .await;
    let truth = case.restore().await.unwrap();
    let fields = liar.fields().remove("Receive").expect("it was called");
    for (field, kind) in fields.iter().enumerate() {
        for what in [
            LieKind::Dropped,
            LieKind::Text("another".into()),
            LieKind::Number(7),
        ] {
            if matches!(
                (kind, &what),
                (Kind::Number, LieKind::Text(_)) | (Kind::Text, LieKind::Number(_))
            ) {
                continue;
            }
            let lie = Lie {
                method: "Receive".into(),
                field,
                what,
            };
            let context = format!("{lie:?}");
            liar.set_lie(Some(lie));
            match case.restore().await {
                Ok(reported) => assert_eq!(reported.volume_id, truth.volume_id, "{context}"),
                Err(status) => {
                    assert_eq!(status.code(), Code::Unavailable, "{context}: {status:?}");
                    assert!(status.message().contains("node-b"), "{context}: {status:?}");
                }
            }
        }
    }
    liar.set_lie(None);
    assert_eq!(case.restore().await.unwrap(), truth);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_never_answers_holds_a_call_until_its_deadline_alone() {
    let mut case = Case::new().await;
    let real = case.a.reported_port.unwrap();
    let silent = fake::silent();
    case.reports_port(silent.address.port()).await;
    let answer = case.call(&[], Duration::from_secs(7)).await.unwrap();
    refused(answer, Code::Aborted, &["node-a"]);
    // Its connection breaks.
    drop(silent);
    case.reports_port(real).await;
    let made = loop {
        match case.restore().await {
            Err(status) if status.code() == Code::Unavailable => {
                assert!(status.message().contains("node-a"), "{status:?}");
            }
            made => break made.unwrap(),
        }
    };
    case.check(&made);
    // A volume that is complete does not need its source.
    case.a.kill();
    case.routed.until("node-a", false).await;
    assert_eq!(case.restore().await.unwrap(), made);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_progress_of_a_copy_is_an_event_on_its_claim() {
    let case = Case::new().await;
    let (opens, call) = case.running().await;
    let reported = || {
        let mut messages = Vec::new();
        case.update(|state| {
            let each = state.reported.iter().zip(&state.messages);
            let its = each.filter(|((_, reason), _)| *reason == "CopyProgress");
            messages = its.map(|(_, message)| message.clone()).collect();
        });
        messages
    };
    eventually("an event", async || !reported().is_empty()).await;
    assert_eq!(
        reported()[0],
        "at least 0 % of 0.1 GiB are copied to node node-b"
    );
    assert_eq!(case.b.driver.snapshots.copies().len(), 1);
    drop(opens);
    call.await.unwrap().unwrap();
    assert_eq!(case.b.driver.snapshots.copies(), []);
    let space = case.a.driver.pool_status()[0].space.unwrap();
    let (sent, received) = (
        case.a.driver.snapshots.sent_bytes(),
        case.b.driver.snapshots.received(),
    );
    assert!(
        sent > 0 && sent == received && sent * 100 <= space.snapshots * 102,
        "{sent} bytes sent, {received} received"
    );
}
