//! Exports and imports between simulated machines, on both kinds of pools.

use std::path::Path;

use super::*;
use crate::cut::CutInterfaces;
use crate::host::memory::{FaultMode, MemoryHost};
use crate::model::SnapshotParameters;
use crate::model::size::MIB;
use crate::operation::tests::{ext4, new_volume, pool, settings};
use crate::operation::{CreateGroup, CreateSnapshot, Driver, Export, ListVolumes, StageVolume};

const KINDS: [&str; 2] = ["default=memory:", "default=memory-thin:"];
const STAGING: &str = "/var/lib/kubelet/staging";

struct Node {
    host: MemoryHost,
    driver: Driver,
    kind: &'static str,
}

fn start(host: &MemoryHost, kind: &str) -> Driver {
    Driver::start(
        settings(&[pool(kind)]),
        CutInterfaces::simulated(host.clone()),
    )
    .unwrap()
}

impl Node {
    fn new(kind: &'static str) -> Node {
        let host = MemoryHost::new();
        let driver = start(&host, kind);
        Node { host, driver, kind }
    }

    fn restart(&mut self, power_loss: bool) {
        self.host = match power_loss {
            true => self.host.reboot(true),
            false => self.host.restart_process(),
        };
        self.driver = start(&self.host, self.kind);
    }

    fn volume(&self, name: &str) -> String {
        let mut request = new_volume(name);
        request.capacity = CapacityRange::new(256 << 20, 0).unwrap();
        request.capabilities = vec![ext4()];
        self.driver
            .volumes
            .create_volume(&request)
            .unwrap()
            .id
            .to_string()
    }

    fn staged<T>(&self, volume: &str, act: impl FnOnce() -> T) -> T {
        let staged = self.driver.volumes.stage_volume(&StageVolume {
            volume_id: volume.into(),
            staging_path: STAGING.into(),
            capability: ext4(),
        });
        staged.unwrap();
        let done = act();
        self.driver.volumes.unstage_volume(volume, STAGING).unwrap();
        done
    }

    fn write(&self, volume: &str, token: u64) {
        let write = || self.host.write_token(Path::new(STAGING), token).unwrap();
        self.staged(volume, write);
    }

    fn snapshot(&self, volume: &str, name: &str) -> String {
        let made = self.driver.snapshots.create_snapshot(&CreateSnapshot {
            name: name.into(),
            source_volume_id: volume.into(),
            parameters: SnapshotParameters::default(),
            requisite: Vec::new(),
        });
        made.unwrap().id.to_string()
    }

    fn export(&self, snapshots: &[&str], bases: &[&str]) -> Result<Vec<u8>> {
        let mut archive = Vec::new();
        let ids = |ids: &[&str]| ids.iter().map(|id| id.to_string()).collect();
        let request = Export {
            snapshot_ids: ids(snapshots),
            base_snapshot_ids: ids(bases),
        };
        let done = self.driver.snapshots.export(&request, &mut archive);
        assert_eq!(self.driver.snapshots.readers(), 0);
        done.map(|()| archive)
    }

    fn import(&self, archive: &[u8], request: &Import) -> Result<Vec<Volume>> {
        let archive = std::io::Cursor::new(archive.to_vec());
        self.driver.volumes.import(request, Box::new(archive))
    }

    fn tokens(&self, volume: &Volume) -> Vec<u64> {
        let tokens = || self.host.tokens(Path::new(STAGING)).unwrap();
        self.staged(&volume.id.to_string(), tokens)
    }

    /// The names of complete volumes.
    fn listed(&self) -> usize {
        let all = self.driver.volumes.list_volumes(&ListVolumes::default());
        all.unwrap().volumes.len()
    }

    fn mkfs(&self) -> u64 {
        self.driver.volumes.formats()
    }
}

fn refusal<T: std::fmt::Debug>(result: Result<T>) -> String {
    result.unwrap_err().to_string()
}

fn pairs() -> impl Iterator<Item = (Node, Node)> {
    let each = |from| KINDS.map(|to| (Node::new(from), Node::new(to)));
    KINDS.into_iter().flat_map(each)
}

#[test]
fn an_imported_volume_has_the_content_of_the_snapshot_and_is_never_formatted() {
    for (source, target) in pairs() {
        let volume = source.volume("a");
        source.write(&volume, 1);
        let snapshot = source.snapshot(&volume, "s");
        source.write(&volume, 2);
        let archive = source.export(&[&snapshot], &[]).unwrap();
        assert!(
            archive.len() < 4 * MIB as usize,
            "holes are not sent: {}",
            archive.len()
        );
        let request = Import {
            size: Some(512 * MIB),
            ..Import::default()
        };
        let made = target.import(&archive, &request).unwrap();
        assert_eq!(
            (made.len(), made[0].size, made[0].is_complete),
            (1, 512 * MIB, true)
        );
        assert_eq!(target.tokens(&made[0]), [1]);
        assert_eq!(target.mkfs(), 0);

        // A repeat is recognized, also after the volume was used.
        target.write(&made[0].id.to_string(), 9);
        let again = target.import(&archive, &request).unwrap();
        assert_eq!(again[0].id, made[0].id);
        assert_eq!(target.tokens(&again[0]), [1, 9]);
        // Another content does not replace it, and it does not count as that one.
        let other = source.snapshot(&volume, "other");
        let other = source.export(&[&other], &[]).unwrap();
        let message = refusal(target.import(&other, &request));
        assert!(
            message.contains("already exists") || message.contains("exists"),
            "{message}"
        );
        let renamed = Import {
            prefix: "again-".into(),
            ..Import::default()
        };
        let second = target.import(&other, &renamed).unwrap();
        assert_eq!(target.tokens(&second[0]), [1, 2]);
        for node in [source, target] {
            assert_eq!(node.host.violations(), [""; 0]);
            assert_eq!(node.driver.pools.locks_held(), 0);
        }
    }
}

#[test]
fn a_name_that_csi_does_not_allow_is_refused() {
    let (source, target) = (Node::new(KINDS[0]), Node::new(KINDS[0]));
    let snapshot = source.snapshot(&source.volume("a"), "s");
    let archive = source.export(&[&snapshot], &[]).unwrap();
    for name in [String::new(), "a\u{1b}[2J".into(), "a".repeat(129)] {
        let request = Import {
            name: Some(name),
            ..Import::default()
        };
        let message = refusal(target.import(&archive, &request));
        assert!(message.contains("is not valid"), "{message}");
    }
    assert_eq!(target.listed(), 0);
}

#[test]
fn a_volume_that_was_never_used_is_imported_as_a_raw_device() {
    let (source, target) = (Node::new(KINDS[0]), Node::new(KINDS[0]));
    let snapshot = source.snapshot(&source.volume("a"), "s");
    let archive = source.export(&[&snapshot], &[]).unwrap();
    let made = target
        .import(&archive, &Import::default())
        .unwrap()
        .remove(0);
    let pool = target.driver.pools.serving().remove(0);
    let record = pool.backend.volumes.get(made.id.uuid).unwrap().unwrap();
    assert_eq!(record.formatted, Some(Formatted::raw()));
}

#[test]
fn differences_are_imported_into_the_content_that_they_are_of() {
    for (source, target) in pairs() {
        let volume = source.volume("a");
        source.write(&volume, 1);
        let first = source.snapshot(&volume, "1");
        source.write(&volume, 2);
        let second = source.snapshot(&volume, "2");
        source.write(&volume, 3);
        let third = source.snapshot(&volume, "3");
        let full = source.export(&[&first], &[]).unwrap();
        let more = source.export(&[&second], &[&first]).unwrap();
        let last = source.export(&[&third], &[&second]).unwrap();
        let leave = Import {
            more: true,
            ..Import::default()
        };

        // Without the base, nothing is created.
        let message = refusal(target.import(&more, &leave));
        assert!(message.contains("only the differences"), "{message}");
        let made = target.import(&full, &leave).unwrap();
        assert!(!made[0].is_complete);
        // Out of order: what was imported stays.
        let message = refusal(target.import(&last, &leave));
        assert!(message.contains("only the differences"), "{message}");
        // Nor is it begun again with another size.
        let larger = Import {
            size: Some(512 * MIB),
            ..leave.clone()
        };
        let message = refusal(target.import(&more, &larger));
        assert!(message.contains("give the same size"), "{message}");
        target.import(&more, &leave).unwrap();
        // A repeat changes nothing.
        target.import(&more, &leave).unwrap();
        assert_eq!(target.listed(), 0);
        let made = target.import(&last, &Import::default()).unwrap();
        assert_eq!(target.tokens(&made[0]), [1, 2, 3]);
        assert_eq!(target.mkfs(), 0);
        assert_eq!(target.host.violations(), [""; 0]);
    }
}

#[test]
fn a_group_is_imported_as_a_whole() {
    let (source, target) = (Node::new(KINDS[1]), Node::new(KINDS[0]));
    let volumes = ["a", "b"].map(|name| source.volume(name));
    source.write(&volumes[0], 1);
    source.write(&volumes[1], 2);
    let group = source.driver.snapshots.create_group(&CreateGroup {
        name: "g".into(),
        source_volume_ids: volumes.to_vec(),
        parameters: SnapshotParameters::default(),
    });
    let ids: Vec<String> = group
        .unwrap()
        .snapshots
        .iter()
        .map(|one| one.id.to_string())
        .collect();
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    let alone = source.snapshot(&volumes[0], "alone");
    let message = refusal(source.export(&[ids[0], &alone], &[]));
    assert!(message.contains("not members of one group"), "{message}");
    let archive = source.export(&ids, &[]).unwrap();

    // The second member is damaged: no volume is complete.
    let mut damaged = archive.clone();
    let last = damaged.len() - 200;
    damaged[last] ^= 1;
    let message = refusal(target.import(&damaged, &Import::default()));
    assert!(message.contains("frame"), "{message}");
    assert_eq!(target.listed(), 0);

    let made = target.import(&archive, &Import::default()).unwrap();
    assert_eq!(target.tokens(&made[0]), [1]);
    assert_eq!(target.tokens(&made[1]), [2]);
}

#[test]
fn an_export_with_a_base_of_another_volume_is_refused() {
    let source = Node::new(KINDS[0]);
    let (one, other) = (source.volume("a"), source.volume("b"));
    let one = source.snapshot(&one, "1");
    let other = source.snapshot(&other, "2");
    let message = refusal(source.export(&[&one], &[&other]));
    assert!(
        message.contains("not a snapshot of the same volume"),
        "{message}"
    );
    let absent = source.export(&["x"], &[]);
    assert!(matches!(absent, Err(Error::NotFound { .. })), "{absent:?}");
}

/// Everything that is wrong in an archive is found before a volume is complete, and what was
/// imported before it is not lost.
#[test]
fn an_archive_that_is_damaged_at_any_place_completes_nothing() {
    let source = Node::new(KINDS[0]);
    let volume = source.volume("a");
    source.write(&volume, 1);
    let snapshot = source.snapshot(&volume, "s");
    let archive = source.export(&[&snapshot], &[]).unwrap();
    let target = Node::new(KINDS[1]);
    let step = archive.len() / 60 + 1;
    for at in (0..archive.len()).step_by(step).chain([archive.len() - 1]) {
        let mut damaged = archive.clone();
        damaged[at] ^= 4;
        refusal(target.import(&damaged, &Import::default()));
        refusal(target.import(&archive[..at], &Import::default()));
        assert_eq!(target.listed(), 0, "byte {at}");
    }
    let made = target.import(&archive, &Import::default()).unwrap();
    assert_eq!(target.tokens(&made[0]), [1]);
}

#[test]
fn an_import_continues_after_a_crash_at_any_effect() {
    for kind in KINDS {
        let source = Node::new(KINDS[0]);
        let volume = source.volume("a");
        source.write(&volume, 1);
        let first = source.snapshot(&volume, "1");
        source.write(&volume, 2);
        let second = source.snapshot(&volume, "2");
        let full = source.export(&[&first], &[]).unwrap();
        let more = source.export(&[&second], &[&first]).unwrap();
        let leave = Import {
            more: true,
            ..Import::default()
        };
        let mut crashes = 0;
        for n in (1..).step_by(3) {
            let mut target = Node::new(kind);
            let acts = |target: &Node| {
                target.import(&full, &leave)?;
                target.import(&more, &Import::default())
            };
            target.host.fail_effect(n, FaultMode::CrashAfter);
            let whole = acts(&target).is_ok();
            target.host.clear_faults();
            target.restart(n % 2 == 0);
            if !whole {
                crashes += 1;
            }
            let again = match target.import(&more, &Import::default()) {
                Ok(made) => Ok(made),
                Err(_) => acts(&target),
            };
            let made = again.unwrap_or_else(|error| panic!("{kind}, effect {n}: {error}"));
            assert_eq!(target.tokens(&made[0]), [1, 2], "{kind}, effect {n}");
            assert_eq!(target.mkfs(), 0);
            assert_eq!(target.host.violations(), [""; 0], "{kind}, effect {n}");
            if whole {
                break;
            }
        }
        assert!(crashes > 5, "{crashes}");
    }
}

#[test]
fn the_volumes_of_a_long_import_are_not_forgotten() {
    let source = Node::new(KINDS[0]);
    let volume = source.volume("a");
    source.write(&volume, 1);
    let snapshot = source.snapshot(&volume, "s");
    let archive = source.export(&[&snapshot], &[]).unwrap();
    let target = Node::new(KINDS[0]);
    let leave = Import {
        more: true,
        ..Import::default()
    };
    let clean = || {
        let pools = target.driver.served().into_iter();
        pools.for_each(|pool| target.driver.clean(pool));
    };
    let there = || {
        let pool = target.driver.pools.serving().remove(0);
        pool.backend.volumes.unready().len()
    };
    target.import(&archive, &leave).unwrap();
    target.host.pass_time(std::time::Duration::from_secs(3000));
    target.import(&archive, &leave).unwrap();
    target.host.pass_time(std::time::Duration::from_secs(3000));
    clean();
    assert_eq!(there(), 1);
    target.host.pass_time(std::time::Duration::from_secs(3601));
    clean();
    assert_eq!(there(), 0);
}
