//! The copies that run, in the answer to Describe.

use crate::agent::RunningCopy;
use crate::agent::running_copy::Kind;
use crate::operation::{CopyKind, CopyStatus, Driver};

/// Maximum number of copies that are reported. At most eight run into pools, and eight out of them.
const MAX_COPIES: usize = 32;

pub(super) fn running_copies(driver: &Driver) -> Vec<RunningCopy> {
    let running = driver.snapshots.copies().into_iter();
    running.take(MAX_COPIES).map(running_copy).collect()
}

fn running_copy(status: CopyStatus) -> RunningCopy {
    RunningCopy {
        volume_name: status.of.name,
        copied_bytes: status.copied,
        total_bytes: status.total,
        kind: kind(status.of.kind).into(),
        id: status.of.id.to_string(),
        claim: status.of.claim.unwrap_or_default(),
        source_node: status.of.source_node.unwrap_or_default(),
        running_seconds: status.running_for.as_secs(),
        before_bytes: status.before,
    }
}

fn kind(kind: CopyKind) -> Kind {
    match kind {
        CopyKind::Restore => Kind::Restore,
        CopyKind::Clone => Kind::Clone,
        CopyKind::Move => Kind::Move,
        CopyKind::Revert => Kind::Revert,
        CopyKind::Import => Kind::Import,
        CopyKind::Export => Kind::Export,
        CopyKind::Snapshot => Kind::Snapshot,
        CopyKind::Write => Kind::Write,
        CopyKind::Growth => Kind::Growth,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::cut::CutInterfaces;
    use crate::error::{Error, Result};
    use crate::host::memory::MemoryHost;
    use crate::model::{
        AccessMode, AccessType, Alpha, Capability, CapacityRange, SnapshotParameters,
        VolumeParameters,
    };
    use crate::operation::{
        Checksum, CreateSnapshot, CreateVolume, OutgoingRead, Purpose, Ranges, RemoteSnapshot,
        Settings, SnapshotRange, SnapshotSource, Ticket, Wanted,
    };
    use crate::record::ContentSource;
    use crate::service::Service;

    const MIB: u64 = 1 << 20;

    /// The agent of another node, which sends a range of 4 MiB when the test has a permission for it.
    struct Slow {
        driver: Arc<Driver>,
        ticket: Ticket,
        permissions: Arc<Mutex<Receiver<()>>>,
    }

    struct SlowRanges {
        driver: Arc<Driver>,
        outgoing: OutgoingRead,
        permissions: Arc<Mutex<Receiver<()>>>,
    }

    impl SnapshotSource for Slow {
        fn node(&self) -> &str {
            "node-2"
        }

        fn read(&self, from: u64, wanted: Wanted) -> Result<Box<dyn Ranges>> {
            let outgoing =
                self.driver
                    .snapshots
                    .open_granted(&self.ticket, &|_| true, (from, wanted))?;
            Ok(Box::new(SlowRanges {
                driver: self.driver.clone(),
                outgoing,
                permissions: self.permissions.clone(),
            }))
        }
    }

    impl Ranges for SlowRanges {
        fn next(&mut self) -> Result<Option<SnapshotRange>> {
            let permission = self.permissions.lock().unwrap().recv();
            permission.map_err(|_| Error::unreachable("node-2", "the network was cut"))?;
            let mut range = self.driver.snapshots.read_next(&mut self.outgoing)?;
            if let Some(range) = &mut range {
                range.checksum = Some(Checksum::crc32(&range.changed, &range.pieces));
            }
            Ok(range)
        }
    }

    fn permit(permissions: &Sender<()>, bytes: u64) {
        for _ in 0..bytes / (4 * MIB) {
            permissions.send(()).unwrap();
        }
    }

    fn driver() -> Arc<Driver> {
        let settings = Settings {
            node_name: "node-1".into(),
            driver_name: "csi.slackwater.dev".into(),
            pools: vec!["default=memory:".parse().unwrap()],
            node_record: "/var/lib/slackwater/node.json".into(),
            state_dir: "/run/slackwater/state".into(),
            ..Settings::default()
        };
        let driver = Driver::start(settings, CutInterfaces::simulated(MemoryHost::new()));
        Arc::new(driver.unwrap())
    }

    fn asked(snapshot: Option<&str>) -> CreateVolume {
        CreateVolume {
            name: "pvc-1".into(),
            capacity: CapacityRange::new(64 << 20, 0).unwrap(),
            capabilities: vec![Capability {
                access_type: AccessType::Block,
                access_mode: AccessMode::SingleNodeWriter,
            }],
            parameters: VolumeParameters {
                claim: Some("shop/data".into()),
                ..VolumeParameters::default()
            },
            requisite: Vec::new(),
            content_source: snapshot.map(|id| ContentSource::Snapshot(id.into())),
        }
    }

    /// A snapshot of 64 MiB of another node.
    fn snapshot(driver: &Driver) -> String {
        let volume = driver.volumes.create_volume(&asked(None)).unwrap();
        let made = driver.snapshots.create_snapshot(&CreateSnapshot {
            name: "s".into(),
            source_volume_id: volume.id.to_string(),
            parameters: SnapshotParameters::default(),
            requisite: Vec::new(),
        });
        made.unwrap().id.to_string()
    }

    fn slow(driver: &Arc<Driver>, snapshot: &str) -> (Sender<()>, RemoteSnapshot) {
        let (sender, permissions) = channel();
        let offer = driver.snapshots.offer(snapshot, "node-1", &[]).unwrap();
        let source = Slow {
            driver: driver.clone(),
            ticket: offer.ticket,
            permissions: Arc::new(Mutex::new(permissions)),
        };
        let remote = RemoteSnapshot {
            id: snapshot.into(),
            offer,
            source: Arc::new(source),
            purpose: Purpose::Restore,
            verify: false,
            is_archived: false,
        };
        (sender, remote)
    }

    async fn reported(service: &Service, copied: u64) -> RunningCopy {
        for _ in 0..1000 {
            let mut copies = service.handle_describe().await.unwrap().copies;
            if copies
                .first()
                .is_some_and(|copy| copy.copied_bytes == copied && copy.total_bytes > 0)
            {
                return copies.remove(0);
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        panic!("no copy with {copied} bytes is reported");
    }

    #[tokio::test]
    async fn a_slow_copy_is_reported_until_it_ends_and_from_where_a_repeat_continues() {
        let service = Service::new(driver(), Alpha::default());
        let source = driver();
        let snapshot = snapshot(&source);
        let run = |remote: RemoteSnapshot| {
            let (driver, asked) = (service.driver.clone(), asked(Some(&snapshot)));
            let receive = move || driver.volumes.receive_volume(&asked, Ok(remote));
            tokio::task::spawn_blocking(receive)
        };
        let (sender, remote) = slow(&source, &snapshot);
        let copying = run(remote);
        let begun = reported(&service, 0).await;
        permit(&sender, 16 * MIB);
        let later = reported(&service, 16 * MIB).await;
        let pool = service.handle_describe().await.unwrap().pools.remove(0).id;
        assert!(later.id.starts_with(&format!("{pool}.")), "{}", later.id);
        let expected = RunningCopy {
            volume_name: "pvc-1".into(),
            copied_bytes: 16 * MIB,
            total_bytes: 64 * MIB,
            kind: Kind::Restore.into(),
            id: later.id.clone(),
            claim: "shop/data".into(),
            source_node: "node-2".into(),
            running_seconds: later.running_seconds,
            before_bytes: 0,
        };
        assert_eq!(later, expected);
        assert!(begun.running_seconds <= later.running_seconds);

        // The network is cut: what was copied stays, and a repeat begins there.
        drop(sender);
        copying.await.unwrap().unwrap_err();
        assert_eq!(service.handle_describe().await.unwrap().copies, []);
        let (sender, remote) = slow(&source, &snapshot);
        let copying = run(remote);
        let again = reported(&service, 16 * MIB).await;
        assert_eq!((again.before_bytes, again.id), (16 * MIB, expected.id));
        permit(&sender, 48 * MIB);
        copying.await.unwrap().unwrap();
        assert_eq!(service.handle_describe().await.unwrap().copies, []);
    }
}
