//! Volumes that are filled from a snapshot of another node, on two simulated machines.

mod differences;

use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use slackwater_testkit::Sweep;

use super::*;
use crate::cut::CutInterfaces;
use crate::error::Kind;
use crate::host::memory::{FaultMode, MemoryHost, MemoryOptions};
use crate::model::size::GIB;
use crate::model::size::MIB;
use crate::model::{Allocation, CapacityRange, SnapshotParameters, VolumeParameters};
use crate::operation::tests::{ext4, pool, settings};
use crate::operation::{CreateSnapshot, CreateVolume, Driver, StageVolume, Ticket, Volume};
use crate::record::{ContentSource, VolumeState};

const STAGING: &str = "/var/lib/kubelet/staging";
const READER: &str = "reader";

fn stage(driver: &Driver, volume_id: &str) {
    let staged = driver.volumes.stage_volume(&StageVolume {
        volume_id: volume_id.into(),
        staging_path: STAGING.into(),
        capability: ext4(),
    });
    staged.unwrap();
}

fn unstage(driver: &Driver, volume_id: &str) {
    let unstaged = driver.volumes.unstage_volume(volume_id, STAGING);
    unstaged.unwrap();
}

/// A machine with one pool, and its driver.
struct Node {
    host: MemoryHost,
    driver: Arc<Driver>,
    pool: &'static str,
}

fn start(host: &MemoryHost, definition: &str) -> Arc<Driver> {
    let settings = settings(&[pool(definition)]);
    Arc::new(Driver::start(settings, CutInterfaces::simulated(host.clone())).unwrap())
}

impl Node {
    fn new(definition: &'static str) -> Node {
        Node::with(definition, MemoryOptions::default())
    }

    fn with(definition: &'static str, options: MemoryOptions) -> Node {
        let host = MemoryHost::with_options(options);
        let driver = start(&host, definition);
        Node {
            host,
            driver,
            pool: definition,
        }
    }

    fn restart(&mut self, power_loss: bool) {
        self.host = match power_loss {
            true => self.host.reboot(true),
            false => self.host.restart_process(),
        };
        self.driver = start(&self.host, self.pool);
    }

    /// A snapshot of a volume with these tokens.
    fn snapshot(&self, name: &str, tokens: &[u64]) -> String {
        let volume = self.driver.volumes.create_volume(&request(name, None));
        let volume = volume.unwrap().id.to_string();
        self.snapshot_of(&volume, &format!("of-{name}"), tokens)
    }

    /// A snapshot of an existing volume, to which these tokens are written before.
    fn snapshot_of(&self, volume: &str, name: &str, tokens: &[u64]) -> String {
        stage(&self.driver, volume);
        for token in tokens {
            self.host.write_token(Path::new(STAGING), *token).unwrap();
        }
        let made = self.driver.snapshots.create_snapshot(&CreateSnapshot {
            name: name.into(),
            source_volume_id: volume.into(),
            parameters: SnapshotParameters::default(),
            requisite: Vec::new(),
        });
        unstage(&self.driver, volume);
        made.unwrap().id.to_string()
    }

    fn tokens(&self, volume: &Volume) -> Vec<u64> {
        let id = volume.id.to_string();
        stage(&self.driver, &id);
        let tokens = self.host.tokens(Path::new(STAGING)).unwrap();
        unstage(&self.driver, &id);
        tokens
    }

    /// The names of the volumes on its pool that are recorded, complete or not.
    fn volumes(&self) -> Vec<(String, VolumeState)> {
        let pool = self.driver.pools.serving().remove(0);
        let volumes = &pool.backend.volumes;
        let mut found = volumes.ready(None, usize::MAX);
        found.extend(volumes.unready());
        found.into_iter().map(|it| (it.name, it.state)).collect()
    }
}

fn size(bytes: u64) -> CapacityRange {
    CapacityRange {
        required: bytes,
        limit: 0,
    }
}

fn request(name: &str, snapshot: Option<&str>) -> CreateVolume {
    CreateVolume {
        name: name.into(),
        capacity: size(GIB),
        capabilities: vec![ext4()],
        parameters: VolumeParameters::default(),
        requisite: Vec::new(),
        content_source: snapshot.map(|id| ContentSource::Snapshot(id.into())),
    }
}

/// How the network and the source fail.
#[derive(Default)]
struct Faults {
    /// The stream ends with an error after this many ranges.
    cut_after: Option<usize>,
    /// The first byte of data is changed.
    damage: bool,
    /// Streams of this kind have no checksums.
    without: Option<Wanted>,
}

/// The agent of the source, without a network.
struct Direct {
    driver: Arc<Driver>,
    ticket: Ticket,
    caller: &'static str,
    faults: Mutex<Faults>,
    /// From where each stream began, and what was wanted.
    began: Mutex<Vec<(u64, Wanted)>>,
}

struct DirectRanges {
    driver: Arc<Driver>,
    outgoing: crate::operation::OutgoingRead,
    left: Option<usize>,
    damage: bool,
    is_bare: bool,
}

impl SnapshotSource for Direct {
    fn node(&self) -> &str {
        "source"
    }

    fn read(&self, from: u64, wanted: Wanted) -> Result<Box<dyn Ranges>> {
        self.began.lock().unwrap().push((from, wanted));
        let is_caller = |node: &str| node == self.caller;
        let snapshots = &self.driver.snapshots;
        let outgoing = snapshots.open_granted(&self.ticket, &is_caller, (from, wanted));
        let faults = self.faults.lock().unwrap();
        Ok(Box::new(DirectRanges {
            driver: self.driver.clone(),
            outgoing: outgoing.map_err(|error| match error {
                gone @ Error::NotFound { .. } => gone,
                other => Error::unreachable("source", other.to_string()),
            })?,
            left: faults.cut_after,
            damage: faults.damage,
            is_bare: faults.without == Some(wanted),
        }))
    }
}

impl Ranges for DirectRanges {
    fn next(&mut self) -> Result<Option<SnapshotRange>> {
        if self.left == Some(0) {
            return Err(Error::unreachable("source", "the network was cut"));
        }
        self.left = self.left.map(|left| left - 1);
        let mut range = self.driver.snapshots.read_next(&mut self.outgoing)?;
        if let Some(range) = &mut range {
            let sent = Checksum::crc32(&range.changed, &range.pieces);
            let sent = range.checksum.unwrap_or(sent);
            range.checksum = (!self.is_bare).then_some(sent);
        }
        if self.damage
            && let Some(piece) = range.as_mut().and_then(|range| range.pieces.first_mut())
        {
            piece.bytes[0] ^= 1;
        }
        Ok(range)
    }
}

fn direct(source: &Node, snapshot: &str) -> (Offer, Arc<Direct>) {
    direct_with(source, snapshot, &[])
}

fn direct_with(source: &Node, snapshot: &str, bases: &[String]) -> (Offer, Arc<Direct>) {
    let snapshots = &source.driver.snapshots;
    let offer = snapshots.offer(snapshot, READER, bases).unwrap();
    let direct = Direct {
        driver: source.driver.clone(),
        ticket: offer.ticket,
        caller: READER,
        faults: Mutex::default(),
        began: Mutex::default(),
    };
    (offer, Arc::new(direct))
}

fn remote(snapshot: &str, (offer, source): (Offer, Arc<Direct>)) -> RemoteSnapshot {
    RemoteSnapshot {
        id: snapshot.into(),
        offer,
        source,
        purpose: Purpose::Restore,
        verify: true,
        is_archived: false,
    }
}

fn receive(target: &Node, asked: &CreateVolume, remote: RemoteSnapshot) -> Result<Volume> {
    target.driver.volumes.receive_volume(asked, Ok(remote))
}

#[test]
fn a_volume_gets_the_content_of_a_snapshot_of_another_node() {
    let kinds = ["default=memory:", "default=memory-thin:"];
    for (from, to) in kinds
        .into_iter()
        .flat_map(|from| kinds.map(|to| (from, to)))
    {
        for allocation in [Allocation::Thin, Allocation::Thick] {
            let (source, target) = (Node::new(from), Node::new(to));
            let snapshot = source.snapshot("a", &[1, 2, 3]);
            let mut asked = request("copy", Some(&snapshot));
            asked.capacity = size(2 * GIB);
            asked.parameters.allocation = allocation;
            let made = receive(
                &target,
                &asked,
                remote(&snapshot, direct(&source, &snapshot)),
            );
            let made = made.unwrap();
            assert_eq!(made.size, 2 * GIB);
            assert_eq!(target.tokens(&made), [1, 2, 3], "{from} to {to}");
            // The answer is the same without the source.
            let gone = Error::unreachable("source", "its node is down");
            let again = target.driver.volumes.receive_volume(&asked, Err(gone));
            assert_eq!(again.unwrap().id, made.id);
            for node in [source, target] {
                assert_eq!(node.host.violations(), [""; 0]);
            }
        }
    }
}

/// A volume that was cloned keeps the volume of the other node as its content source when it moves.
#[test]
fn a_volume_whose_content_source_is_a_volume_of_another_node_is_received() {
    for kind in ["default=memory:", "default=memory-thin:"] {
        for purpose in [Purpose::Restore, Purpose::Move] {
            let (source, target) = (Node::new(kind), Node::new(kind));
            let snapshot = source.snapshot("v", &[1, 2]);
            let cloned = source.driver.snapshots.get_snapshot(&snapshot).unwrap();
            let volume = cloned.source_volume_id.to_string();
            let asked = CreateVolume {
                content_source: Some(ContentSource::Volume(volume)),
                ..request("clone", None)
            };
            let remote = RemoteSnapshot {
                purpose,
                ..remote(&snapshot, direct(&source, &snapshot))
            };
            let made = receive(&target, &asked, remote).unwrap();
            assert_eq!(made.content_source, asked.content_source, "{kind}");
            assert_eq!(target.tokens(&made), [1, 2], "{kind}");
        }
    }
}

#[test]
fn a_copy_that_the_network_ended_continues_where_it_is_durable() {
    let source = Node::new("default=memory:");
    let mut target = Node::new("default=memory-thin:");
    let snapshot = source.snapshot("a", &[4, 5]);
    let asked = request("copy", Some(&snapshot));
    for (power_loss, ranges) in [(false, 9), (true, 21)] {
        let (offer, cut) = direct(&source, &snapshot);
        cut.faults.lock().unwrap().cut_after = Some(ranges);
        let refused = receive(&target, &asked, remote(&snapshot, (offer, cut))).unwrap_err();
        assert!(matches!(refused, Error::Unreachable { .. }), "{refused:?}");
        assert_eq!(target.volumes(), [("copy".into(), VolumeState::Creating)]);
        target.restart(power_loss);
    }
    let (offer, whole) = direct(&source, &snapshot);
    let made = receive(&target, &asked, remote(&snapshot, (offer, whole.clone())));
    assert_eq!(target.tokens(&made.unwrap()), [4, 5]);
    // Two steps of four ranges in the first run, five in the second one; then the verification.
    let expected = [(7 * 16 * MIB, Wanted::Data), (0, Wanted::Digests)];
    assert_eq!(*whole.began.lock().unwrap(), expected);
    assert_eq!(target.host.violations(), [""; 0]);
}

#[test]
fn a_copy_of_a_snapshot_that_does_not_exist_any_more_is_undone() {
    let (source, target) = (Node::new("default=memory:"), Node::new("default=memory:"));
    let snapshot = source.snapshot("a", &[1]);
    let asked = request("copy", Some(&snapshot));
    let cut_off = || {
        let (offer, cut) = direct(&source, &snapshot);
        cut.faults.lock().unwrap().cut_after = Some(8);
        receive(&target, &asked, remote(&snapshot, (offer, cut))).unwrap_err();
        assert_eq!(target.volumes().len(), 1);
    };
    cut_off();
    let gone = Error::not_found(Kind::Snapshot, &snapshot);
    let refused = target.driver.volumes.receive_volume(&asked, Err(gone));
    assert!(
        matches!(refused, Err(Error::NotFound { .. })),
        "{refused:?}"
    );
    assert_eq!(target.volumes(), []);
    cut_off();
    // It is deleted between the offer and the read.
    let offered = direct(&source, &snapshot);
    source.driver.snapshots.delete_snapshot(&snapshot).unwrap();
    let refused = receive(&target, &asked, remote(&snapshot, offered));
    assert!(
        matches!(refused, Err(Error::NotFound { .. })),
        "{refused:?}"
    );
    assert_eq!(target.volumes(), []);
}

/// Only an archive protects its data in another way.
#[test]
fn data_and_digests_without_a_checksum_complete_no_volume() {
    for without in [Wanted::Data, Wanted::Digests] {
        let (source, target) = (Node::new("default=memory:"), Node::new("default=memory:"));
        let snapshot = source.snapshot("a", &[1]);
        let (offer, bare) = direct(&source, &snapshot);
        bare.faults.lock().unwrap().without = Some(without);
        let asked = request("copy", Some(&snapshot));
        receive(&target, &asked, remote(&snapshot, (offer, bare))).unwrap_err();
        let effects = target.host.effect_log();
        let is_written = effects.iter().any(|effect| effect.contains("write_range"));
        assert_eq!(is_written, without == Wanted::Digests);
        let mut volumes = target.volumes().into_iter();
        assert!(volumes.all(|(_, state)| state != VolumeState::Ready));
    }
}

#[test]
fn damaged_data_is_not_written() {
    let (source, target) = (Node::new("default=memory:"), Node::new("default=memory:"));
    let snapshot = source.snapshot("a", &[1]);
    let (offer, bad) = direct(&source, &snapshot);
    bad.faults.lock().unwrap().damage = true;
    let asked = request("copy", Some(&snapshot));
    let refused = receive(&target, &asked, remote(&snapshot, (offer, bad))).unwrap_err();
    assert!(refused.to_string().contains("damaged"), "{refused}");
    let effects = target.host.effect_log();
    assert!(!effects.iter().any(|effect| effect.contains("write_range")));
    let made = receive(
        &target,
        &asked,
        remote(&snapshot, direct(&source, &snapshot)),
    );
    assert_eq!(target.tokens(&made.unwrap()), [1]);
}

#[test]
fn a_copy_for_which_the_target_has_no_space_is_undone() {
    let (source, target) = (Node::new("default=memory:"), Node::new("default=memory:"));
    let snapshot = source.snapshot("a", &[1]);
    let asked = request("copy", Some(&snapshot));
    let is_undone = || {
        let source = direct(&source, &snapshot);
        let full = receive(&target, &asked, remote(&snapshot, source)).unwrap_err();
        assert!(full.is_no_space(), "{full:?}");
        assert_eq!(target.volumes(), []);
    };
    target
        .host
        .fail_always("write_range", Some(nix::errno::Errno::ENOSPC));
    is_undone();
    target.host.clear_faults();
    target.host.set_capacity(GIB / 2);
    is_undone();
}

#[test]
fn a_block_size_that_the_disk_of_the_target_does_not_have_is_refused() {
    let source = Node::new("default=memory:");
    let coarse = MemoryOptions {
        sector: 4096,
        ..MemoryOptions::default()
    };
    let target = Node::with("default=memory:", coarse);
    let snapshot = source.snapshot("a", &[1]);
    let asked = request("copy", Some(&snapshot));
    let mut explicit = request("copy", Some(&snapshot));
    explicit.parameters.block_size = Some(512);
    for asked in [asked, explicit] {
        let refused = receive(
            &target,
            &asked,
            remote(&snapshot, direct(&source, &snapshot)),
        );
        // The pool of another node may have it.
        let refused = refused.unwrap_err();
        assert!(matches!(refused, Error::Unfit { .. }), "{refused:?}");
        let refused = refused.to_string();
        assert!(
            refused.contains("512") && refused.contains("4096"),
            "{refused}"
        );
        assert_eq!(target.volumes(), []);
    }
}

#[test]
fn a_file_that_is_too_long_for_the_pool_is_refused_by_the_name_of_the_pool() {
    let (source, target) = (Node::new("default=memory:"), Node::new("default=memory:"));
    let snapshot = source.snapshot("a", &[1]);
    let asked = request("copy", Some(&snapshot));
    target
        .host
        .fail_always("allocate", Some(nix::errno::Errno::EFBIG));
    let offered = remote(&snapshot, direct(&source, &snapshot));
    let refused = receive(&target, &asked, offered).unwrap_err();
    assert!(
        matches!(&refused, Error::Unfit { pool, .. } if pool == "default"),
        "{refused:?}"
    );
    assert_eq!(target.volumes(), []);
}

#[test]
fn after_a_final_error_nothing_of_an_earlier_copy_is_left() {
    let (source, target) = (Node::new("default=memory:"), Node::new("default=memory:"));
    let snapshot = source.snapshot("a", &[1]);
    let asked = request("copy", Some(&snapshot));
    let volumes = &target.driver.volumes;
    let offered = || Ok(remote(&snapshot, direct(&source, &snapshot)));
    let elsewhere = CreateVolume {
        requisite: vec!["another".into()],
        ..asked.clone()
    };
    let smaller = CreateVolume {
        capacity: size(GIB / 2),
        ..asked.clone()
    };
    let mut coarse = asked.clone();
    coarse.parameters.block_size = Some(4096);
    for (name, other) in [
        ("topology", elsewhere),
        ("size", smaller),
        ("class", coarse),
    ] {
        let (offer, cut) = direct(&source, &snapshot);
        cut.faults.lock().unwrap().cut_after = Some(8);
        receive(&target, &asked, remote(&snapshot, (offer, cut))).unwrap_err();
        assert_eq!(target.volumes().len(), 1);
        let refused = volumes.receive_volume(&other, offered()).unwrap_err();
        assert!(refused.is_final(), "{name}: {refused:?}");
        assert_eq!(target.volumes(), [], "{name}");
    }
    // If it cannot be deleted, the error is not final.
    let (offer, cut) = direct(&source, &snapshot);
    cut.faults.lock().unwrap().cut_after = Some(8);
    receive(&target, &asked, remote(&snapshot, (offer, cut))).unwrap_err();
    target
        .host
        .fail_always("rename", Some(nix::errno::Errno::EIO));
    let gone = Error::not_found(Kind::Snapshot, &snapshot);
    let refused = volumes.receive_volume(&asked, Err(gone)).unwrap_err();
    assert!(!refused.is_final(), "{refused:?}");
    assert_eq!(target.volumes().len(), 1);
}

#[test]
fn a_ticket_is_for_one_reader_one_snapshot_and_one_hour() {
    let mut source = Node::new("default=memory:");
    let snapshot = source.snapshot("a", &[1]);
    let offer = |source: &Node| source.driver.snapshots.offer(&snapshot, READER, &[]);
    let read = |source: &Node, ticket: &Ticket, caller: &str| {
        let is_caller = |node: &str| node == caller;
        let snapshots = &source.driver.snapshots;
        let outgoing = snapshots.open_granted(ticket, &is_caller, (0, Wanted::Data));
        outgoing.map(drop).map_err(|error| error.to_string())
    };
    let refused = |answer: std::result::Result<(), String>| {
        let why = answer.unwrap_err();
        assert!(why.contains("the ticket"), "{why}");
    };
    let first = offer(&source).unwrap();
    read(&source, &first.ticket, READER).unwrap();
    refused(read(&source, &first.ticket, "another"));
    refused(read(&source, &Ticket([7; 32]), READER));
    let other = source.driver.snapshots.offer(&snapshot, "another", &[]);
    let other = other.unwrap();
    assert_ne!(other.ticket, first.ticket);
    source.host.pass_time(Duration::from_secs(29 * 60));
    assert_eq!(offer(&source).unwrap().ticket, first.ticket, "a repeat");
    source.host.pass_time(Duration::from_secs(2 * 60));
    let second = offer(&source).unwrap().ticket;
    assert_ne!(second, first.ticket, "the first one is about to end");
    read(&source, &first.ticket, READER).unwrap();
    source.host.pass_time(Duration::from_secs(30 * 60));
    refused(read(&source, &first.ticket, READER));
    read(&source, &second, READER).unwrap();
    source.restart(false);
    refused(read(&source, &second, READER));
    // Another snapshot with the same ID.
    let third = offer(&source).unwrap().ticket;
    source.driver.snapshots.delete_snapshot(&snapshot).unwrap();
    assert_eq!(source.snapshot("a", &[2]), snapshot);
    let gone = read(&source, &third, READER).unwrap_err();
    assert!(gone.contains("not"), "{gone}");
    read(&source, &offer(&source).unwrap().ticket, READER).unwrap();
}

#[test]
fn a_snapshot_is_not_deleted_while_it_is_read() {
    let source = Node::new("default=memory-thin:");
    let snapshot = source.snapshot("a", &[1]);
    let snapshots = &source.driver.snapshots;
    let ticket = snapshots.offer(&snapshot, READER, &[]).unwrap().ticket;
    let mut outgoing = snapshots
        .open_granted(&ticket, &|_| true, (0, Wanted::Data))
        .unwrap();
    snapshots.read_next(&mut outgoing).unwrap();
    let read = snapshots.read_snapshots();
    assert!(snapshot.ends_with(&read[0]) && read.len() == 1, "{read:?}");
    let refused = snapshots.delete_snapshot(&snapshot).unwrap_err();
    assert!(matches!(refused, Error::Refused { .. }), "{refused:?}");
    assert!(
        refused.to_string().contains("copied to node reader"),
        "{refused}"
    );
    // Restores on its own node continue.
    let here = source
        .driver
        .volumes
        .create_volume(&request("here", Some(&snapshot)));
    assert_eq!(source.tokens(&here.unwrap()), [1]);
    drop(outgoing);
    assert_eq!(snapshots.read_snapshots(), [""; 0]);
    snapshots.delete_snapshot(&snapshot).unwrap();
    assert_eq!(source.host.violations(), [""; 0]);
}

#[test]
fn a_target_that_crashes_at_any_effect_completes_the_copy_or_leaves_nothing() {
    let source = Node::new("default=memory:");
    let snapshot = source.snapshot("a", &[1, 2]);
    let asked = request("copy", Some(&snapshot));
    let effects = |definition| {
        let target = Node::new(definition);
        let before = target.host.effects();
        receive(
            &target,
            &asked,
            remote(&snapshot, direct(&source, &snapshot)),
        )
        .unwrap();
        target.host.effects() - before
    };
    for definition in ["default=memory:", "default=memory-thin:"] {
        let all = effects(definition);
        // The ranges in the middle are all alike.
        let near = |n: &usize| *n < 24 || n + 24 > all || n.is_multiple_of(37);
        for n in Sweep::requested().part((1..=all).filter(near)) {
            let modes = [
                (false, FaultMode::CrashBefore),
                (true, FaultMode::CrashAfter),
            ];
            for (power_loss, mode) in modes {
                let mut target = Node::new(definition);
                target.host.fail_effect(n, mode);
                let offered = remote(&snapshot, direct(&source, &snapshot));
                let crashed = receive(&target, &asked, offered);
                assert!(crashed.is_err(), "effect {n}");
                target.restart(power_loss);
                let offered = remote(&snapshot, direct(&source, &snapshot));
                let made = receive(&target, &asked, offered).unwrap();
                assert_eq!(target.tokens(&made), [1, 2], "effect {n}");
                assert_eq!(target.host.violations(), [""; 0], "effect {n}");
                target
                    .driver
                    .volumes
                    .delete_volume(&made.id.to_string())
                    .unwrap();
                assert_eq!(target.volumes(), []);
            }
        }
    }
}
