//! Volumes that move: they are filled from one snapshot after the other, with the differences.

use slackwater_testkit::Sweep;

use super::*;
use crate::record::{CopyProgress, VolumeRecord};

const KINDS: [&str; 2] = ["default=memory:", "default=memory-thin:"];

/// A volume with one snapshot after the other.
struct Source {
    node: Node,
    volume: String,
}

impl Source {
    fn new(definition: &'static str) -> Source {
        let node = Node::new(definition);
        let volume = node.driver.volumes.create_volume(&request("data", None));
        let volume = volume.unwrap().id.to_string();
        Source { node, volume }
    }

    fn snapshot(&self, name: &str, tokens: &[u64]) -> String {
        self.node.snapshot_of(&self.volume, name, tokens)
    }

    fn offer(&self, (snapshot, bases): (&str, &[&String]), purpose: Purpose) -> RemoteSnapshot {
        let bases: Vec<String> = bases.iter().map(|base| (*base).clone()).collect();
        RemoteSnapshot {
            purpose,
            ..remote(snapshot, direct_with(&self.node, snapshot, &bases))
        }
    }

    /// Receives a snapshot, and returns the volume with what was read from the source.
    fn send(
        &self,
        target: &Node,
        (snapshot, bases): (&str, &[&String]),
        purpose: Purpose,
    ) -> (Result<Volume>, Vec<(u64, Wanted)>) {
        let ids: Vec<String> = bases.iter().map(|base| (*base).clone()).collect();
        let (offer, direct) = direct_with(&self.node, snapshot, &ids);
        let remote = RemoteSnapshot {
            purpose,
            ..remote(snapshot, (offer, direct.clone()))
        };
        let volume = receive(target, &request("moved", None), remote);
        let began = direct.began.lock().unwrap().clone();
        (volume, began)
    }

    /// Like [`Source::send`], without an error and without what was read.
    #[track_caller]
    fn fill(&self, target: &Node, of: (&str, &[&String])) {
        let volume = self.send(target, of, Purpose::Fill).0.unwrap();
        assert!(!volume.is_complete);
    }

    /// Completes the volume, and returns its tokens.
    #[track_caller]
    fn complete(&self, target: &Node, of: (&str, &[&String])) -> Vec<u64> {
        let volume = self.send(target, of, Purpose::Move).0.unwrap();
        assert!(volume.is_complete);
        let tokens = target.tokens(&volume);
        let id = volume.id.to_string();
        target.driver.volumes.delete_volume(&id).unwrap();
        assert_eq!(target.volumes(), []);
        assert_eq!(target.host.violations(), [""; 0]);
        assert_eq!(self.node.host.violations(), [""; 0]);
        tokens
    }

    fn identity(&self, snapshot: &str) -> u64 {
        let offer = self.node.driver.snapshots.offer(snapshot, READER, &[]);
        offer.unwrap().identity
    }
}

/// The record of the only volume of a node, which is not complete.
fn filling(target: &Node) -> VolumeRecord {
    let pool = target.driver.pools.serving().remove(0);
    let mut unready = pool.backend.volumes.unready();
    assert_eq!(unready.len(), 1);
    unready.remove(0)
}

#[test]
fn differences_are_sent_once_a_volume_has_the_content_of_a_base() {
    for (from, to) in KINDS
        .into_iter()
        .flat_map(|from| KINDS.map(|to| (from, to)))
    {
        let (source, target) = (Source::new(from), Node::new(to));
        let first = source.snapshot("1", &[1]);
        let (volume, began) = source.send(&target, (&first, &[]), Purpose::Fill);
        assert!(!volume.unwrap().is_complete, "{from} to {to}");
        assert_eq!(began, [(0, Wanted::Data), (0, Wanted::Digests)]);
        // A repeat reads nothing.
        let (volume, began) = source.send(&target, (&first, &[]), Purpose::Fill);
        assert!(!volume.unwrap().is_complete);
        assert_eq!(began, []);
        let differences = |base: &str| {
            let base = Wanted::Differences(source.identity(base));
            [(0, base), (0, Wanted::Digests)]
        };
        let second = source.snapshot("2", &[2, 3]);
        // The target chooses the base that it has.
        let third = source.snapshot("3", &[]);
        let (volume, began) = source.send(&target, (&third, &[&second, &first]), Purpose::Fill);
        assert!(!volume.unwrap().is_complete);
        assert_eq!(began, differences(&first));
        let last = source.snapshot("4", &[4]);
        let (volume, began) = source.send(&target, (&last, &[&third]), Purpose::Move);
        let volume = volume.unwrap();
        assert_eq!(began, differences(&third));
        assert!(volume.is_complete && volume.content_source.is_none());
        assert_eq!(target.tokens(&volume), [1, 2, 3, 4], "{from} to {to}");
        // A repeat is answered with it, and does not change it.
        let (again, began) = source.send(&target, (&first, &[]), Purpose::Fill);
        assert!(again.unwrap().is_complete);
        assert_eq!(began, []);
        for host in [&source.node.host, &target.host] {
            assert_eq!(host.violations(), [""; 0]);
        }
    }
}

#[test]
fn a_target_that_crashes_at_any_effect_never_mixes_two_snapshots() {
    for definition in KINDS {
        let source = Source::new(definition);
        let first = source.snapshot("1", &[1]);
        let second = source.snapshot("2", &[2]);
        let third = source.snapshot("3", &[3]);
        let prepared = || {
            let target = Node::new(definition);
            source.fill(&target, (&first, &[]));
            target
        };
        let all = {
            let target = prepared();
            let before = target.host.effects();
            source.fill(&target, (&second, &[&first]));
            target.host.effects() - before
        };
        assert!(all > 5, "{all} effects");
        let two = source.identity(&second);
        let effects = prepared().host.effect_log();
        let filled_by = effects.iter().filter(|it| it.contains("write_range"));
        let filled_by = filled_by.count();
        for n in Sweep::requested().part(1..=all) {
            for (power_loss, mode) in [
                (false, FaultMode::CrashBefore),
                (true, FaultMode::CrashBefore),
                (true, FaultMode::CrashAfter),
            ] {
                for is_newer in [false, true] {
                    let context = format!("{definition}, effect {n}, {mode:?}, {is_newer}");
                    let mut target = prepared();
                    target.host.fail_effect(n, mode);
                    let crashed = source.send(&target, (&second, &[&first]), Purpose::Fill);
                    assert!(crashed.0.is_err(), "{context}");
                    let effects = target.host.effect_log();
                    let written = effects.iter().filter(|it| it.contains("write_range"));
                    let is_mixture = written.count() > filled_by;
                    target.restart(power_loss);
                    let copy = filling(&target).copy.unwrap();
                    let is_recorded = copy.base.is_some() || copy.source_modified == two;
                    assert!(is_recorded || !is_mixture, "{context}: {copy:?}");
                    let expected: &[u64] = match is_newer {
                        // The router goes on with a newer snapshot.
                        true => {
                            source.fill(&target, (&third, &[&first, &second]));
                            &[1, 2, 3]
                        }
                        false => {
                            source.fill(&target, (&second, &[&first]));
                            &[1, 2]
                        }
                    };
                    let last = if is_newer { &third } else { &second };
                    assert_eq!(source.complete(&target, (last, &[])), expected, "{context}");
                }
            }
        }
    }
}

#[test]
fn a_mixture_is_recorded_in_a_way_that_earlier_releases_do_not_continue() {
    let (source, target) = (Source::new(KINDS[0]), Node::new(KINDS[1]));
    let first = source.snapshot("1", &[1]);
    let second = source.snapshot("2", &[2]);
    source.fill(&target, (&first, &[]));
    let filled = filling(&target).copy.unwrap();
    let (one, two) = (source.identity(&first), source.identity(&second));
    assert_eq!((filled.source_modified, filled.base), (one, None));
    assert_eq!(filled.copied, GIB);
    let ids = [first.clone()];
    let (offer, cut) = direct_with(&source.node, &second, &ids);
    cut.faults.lock().unwrap().cut_after = Some(0);
    let cut = RemoteSnapshot {
        purpose: Purpose::Fill,
        ..remote(&second, (offer, cut))
    };
    let refused = receive(&target, &request("moved", None), cut).unwrap_err();
    assert!(matches!(refused, Error::Unreachable { .. }), "{refused:?}");
    let mixed = filling(&target).copy.unwrap();
    let expected = CopyProgress {
        copied: 0,
        source_modified: CopyProgress::beside(two),
        base: Some(one),
    };
    assert_eq!(mixed, expected);
    assert_ne!(mixed.source_modified, two);
    // Without the base, everything is copied again.
    let (volume, began) = source.send(&target, (&second, &[]), Purpose::Fill);
    assert!(!volume.unwrap().is_complete);
    assert_eq!(began[0], (0, Wanted::Data));
    assert_eq!(source.complete(&target, (&second, &[])), [1, 2]);
}

#[test]
fn a_snapshot_that_was_not_copied_to_its_end_is_no_base() {
    for definition in KINDS {
        let (source, mut target) = (Source::new(KINDS[0]), Node::new(definition));
        let first = source.snapshot("1", &[1]);
        let second = source.snapshot("2", &[2]);
        let cut = source.offer((&first, &[]), Purpose::Fill);
        let (offer, direct) = direct_with(&source.node, &first, &[]);
        direct.faults.lock().unwrap().cut_after = Some(9);
        let cut = RemoteSnapshot {
            offer,
            source: direct,
            ..cut
        };
        receive(&target, &request("moved", None), cut).unwrap_err();
        assert!(filling(&target).copy.unwrap().copied > 0);
        target.restart(true);
        let (volume, began) = source.send(&target, (&second, &[&first]), Purpose::Fill);
        assert!(!volume.unwrap().is_complete);
        assert_eq!(began[0], (0, Wanted::Data));
        assert_eq!(source.complete(&target, (&second, &[])), [1, 2]);
    }
}

#[test]
fn a_wrong_base_is_noticed_and_the_next_call_copies_everything() {
    for definition in KINDS {
        let (source, target) = (Source::new(definition), Node::new(KINDS[0]));
        let first = source.snapshot("1", &[1]);
        let same = source.snapshot("2", &[]);
        // The volume gets another content than that of the snapshot which it records.
        let other = source.node.snapshot("other", &[9]);
        let mut wrong = source.offer((&other, &[]), Purpose::Fill);
        wrong.offer.identity = source.identity(&first);
        receive(&target, &request("moved", None), wrong).unwrap();
        let (refused, began) = source.send(&target, (&same, &[&first]), Purpose::Move);
        let why = crate::error::chain(&refused.unwrap_err());
        assert!(why.contains("differs from its source"), "{why}");
        assert_eq!(began[0].1, Wanted::Differences(source.identity(&first)));
        assert_eq!(target.volumes(), []);
        assert_eq!(source.complete(&target, (&same, &[&first])), [1]);
    }
}

#[test]
fn without_its_base_a_snapshot_is_copied_as_a_whole() {
    let (source, target) = (Source::new(KINDS[1]), Node::new(KINDS[0]));
    let first = source.snapshot("1", &[1]);
    let second = source.snapshot("2", &[2]);
    source.fill(&target, (&first, &[]));
    // It is deleted between the offer and the read, which is not final.
    let late = source.offer((&second, &[&first]), Purpose::Fill);
    source
        .node
        .driver
        .snapshots
        .delete_snapshot(&first)
        .unwrap();
    let refused = receive(&target, &request("moved", None), late).unwrap_err();
    assert!(matches!(refused, Error::Unreachable { .. }), "{refused:?}");
    assert!(refused.to_string().contains("compared"), "{refused}");
    assert_eq!(target.volumes().len(), 1);
    // Another snapshot with its ID is another base.
    assert_eq!(source.snapshot("1", &[5]), first);
    let (volume, began) = source.send(&target, (&second, &[&first]), Purpose::Fill);
    assert!(!volume.unwrap().is_complete);
    assert_eq!(began[0], (0, Wanted::Data));
    assert_eq!(source.complete(&target, (&second, &[])), [1, 2]);
}

#[test]
fn a_move_keeps_what_it_has_if_its_snapshot_does_not_exist_any_more() {
    let (source, target) = (Source::new(KINDS[0]), Node::new(KINDS[0]));
    let first = source.snapshot("1", &[1]);
    let second = source.snapshot("2", &[2]);
    source.fill(&target, (&first, &[]));
    let late = source.offer((&second, &[&first]), Purpose::Fill);
    source
        .node
        .driver
        .snapshots
        .delete_snapshot(&second)
        .unwrap();
    let refused = receive(&target, &request("moved", None), late).unwrap_err();
    assert!(matches!(refused, Error::NotFound { .. }), "{refused:?}");
    assert!(filling(&target).copy.unwrap().base.is_none());
    let third = source.snapshot("3", &[3]);
    let (volume, began) = source.send(&target, (&third, &[&first]), Purpose::Fill);
    assert!(!volume.unwrap().is_complete);
    let base = source.identity(&first);
    assert_eq!(began[0].1, Wanted::Differences(base));
    let id = {
        let pool = target.driver.pools.serving().remove(0);
        format!("{}.{}", pool.id(), filling(&target).uuid)
    };
    target.driver.volumes.delete_volume(&id).unwrap();
    assert_eq!(target.volumes(), []);
}

#[test]
fn only_a_granted_base_is_read_and_it_is_not_deleted_during_that() {
    let source = Source::new(KINDS[0]);
    let base = source.snapshot("1", &[1]);
    let snapshot = source.snapshot("2", &[2]);
    let of_another_volume = source.node.snapshot("other", &[3]);
    let snapshots = &source.node.driver.snapshots;
    let read = |ticket: &Ticket, from: u64, base: &str| {
        let wanted = Wanted::Differences(source.identity(base));
        snapshots.open_granted(ticket, &|_| true, (from, wanted))
    };
    let refused = |answer: Result<crate::operation::OutgoingRead>, why: &str| {
        let error = answer.err().expect("it is refused").to_string();
        assert!(error.contains(why), "{error}");
    };
    let bases = [base.clone(), of_another_volume.clone(), "no-such".into()];
    let offer = snapshots.offer(&snapshot, READER, &bases).unwrap();
    assert_eq!(offer.bases, [source.identity(&base)]);
    refused(
        read(&offer.ticket, 0, &of_another_volume),
        "is not in the offer",
    );
    let without = snapshots.offer(&snapshot, READER, &[]).unwrap();
    assert_ne!(without.ticket, offer.ticket);
    refused(read(&without.ticket, 0, &base), "is not in the offer");
    refused(read(&offer.ticket, 17, &base), "multiple");
    let mut outgoing = read(&offer.ticket, 0, &base).unwrap();
    snapshots.read_next(&mut outgoing).unwrap();
    for id in [&base, &snapshot] {
        let refused = snapshots.delete_snapshot(id).unwrap_err();
        let expected = "copied to node reader";
        assert!(refused.to_string().contains(expected), "{refused}");
    }
    drop(outgoing);
    snapshots.delete_snapshot(&base).unwrap();
    snapshots.delete_snapshot(&snapshot).unwrap();
}

#[test]
fn a_pool_whose_snapshots_share_no_blocks_offers_no_base() {
    let ext4 = MemoryOptions {
        fs_name: "ext4".into(),
        ..MemoryOptions::default()
    };
    let node = Node::with("default=memory:", ext4);
    let volume = node.driver.volumes.create_volume(&request("data", None));
    let volume = volume.unwrap().id.to_string();
    let snapshot = |name: &str| {
        let made = node.driver.snapshots.create_snapshot(&CreateSnapshot {
            name: name.into(),
            source_volume_id: volume.clone(),
            parameters: SnapshotParameters::default(),
            requisite: Vec::new(),
        });
        made.unwrap().id.to_string()
    };
    let (base, second) = (snapshot("1"), snapshot("2"));
    let offer = node.driver.snapshots.offer(&second, READER, &[base]);
    assert_eq!(offer.unwrap().bases, [0_u64; 0]);
}

#[test]
fn zeros_are_what_differs_and_has_no_data() {
    let piece = |offset: u64, length: usize| Piece {
        offset,
        bytes: vec![1; length],
    };
    let sent = |pieces: &[Piece], changed: &[Range<u64>]| SnapshotRange {
        offset: 10,
        length: 90,
        pieces: pieces.to_vec(),
        changed: changed.to_vec(),
        checksum: None,
    };
    let zeros = |pieces: &[Piece], changed: &[Range<u64>]| sent(pieces, changed).zeros();
    assert_eq!(zeros(&[], &[]), Some(Vec::new()));
    let both = [20..30, 40..60];
    assert_eq!(zeros(&[], &both), Some(both.to_vec()));
    let pieces = [piece(20, 10), piece(45, 5), piece(55, 2)];
    assert_eq!(zeros(&pieces, &both), Some(vec![40..45, 50..55, 57..60]));
    let one = |start: u64, end: u64| vec![Range { start, end }];
    let both = both.to_vec();
    for wrong in [
        (vec![], one(5, 20)),
        (vec![], one(90, 101)),
        (vec![], vec![40..60, 20..30]),
        (vec![], one(20, 20)),
        (vec![piece(30, 1)], one(20, 30)),
        (vec![piece(28, 4)], both.clone()),
        (vec![piece(28, 14)], both.clone()),
        (vec![piece(45, 5), piece(41, 2)], both.clone()),
        (vec![piece(61, 1)], both),
        (vec![piece(20, 1)], vec![]),
    ] {
        assert_eq!(zeros(&wrong.0, &wrong.1), None, "{wrong:?}");
    }
}
