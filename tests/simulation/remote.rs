//! A snapshot of another simulated machine, from which volumes are filled.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use slackwater::cut::CutInterfaces;
use slackwater::error::{Error, Result};
use slackwater::host::memory::MemoryHost;
use slackwater::model::SnapshotParameters;
use slackwater::model::size::MIB;
use slackwater::operation::{
    Checksum, CreateSnapshot, CreateVolume, Driver, OutgoingRead, Purpose, Ranges, RemoteSnapshot,
    Settings, SnapshotRange, SnapshotSource, StageVolume, Ticket, Wanted,
};
use slackwater::record::ContentSource;

use super::{VolumeConfig, create, range};

/// The size of the snapshot: two steps of a copy.
pub const REMOTE_SIZE: u64 = 32 * MIB;
/// Its content.
pub const REMOTE_TOKENS: [u64; 2] = [71, 72];
/// The node of this machine.
const READER: &str = "node";
const STAGING: &str = "/var/lib/kubelet/staging";

/// The other machine. No fault is planned for it, so all simulations of a process share it.
struct Remote {
    driver: Arc<Driver>,
    snapshot: String,
}

fn remote() -> &'static Remote {
    static REMOTE: OnceLock<Remote> = OnceLock::new();
    REMOTE.get_or_init(|| {
        let host = MemoryHost::new();
        let settings = Settings {
            node_name: "source".into(),
            driver_name: "csi.slackwater.dev".into(),
            pools: vec!["default=memory:".parse().expect("a definition")],
            node_record: "/var/lib/slackwater/node.json".into(),
            state_dir: "/run/slackwater/state".into(),
            ..Settings::default()
        };
        let driver = Driver::start(settings, CutInterfaces::simulated(host.clone()));
        let driver = driver.expect("a start without faults");
        let request = CreateVolume {
            capacity: range(REMOTE_SIZE),
            ..create("remote", VolumeConfig::EXT4)
        };
        let volume = driver.volumes.create_volume(&request).expect("a volume");
        let volume_id = volume.id.to_string();
        let staged = driver.volumes.stage_volume(&StageVolume {
            volume_id: volume_id.clone(),
            staging_path: STAGING.into(),
            capability: VolumeConfig::EXT4.capability(),
        });
        staged.expect("it is staged");
        for token in REMOTE_TOKENS {
            let written = host.write_token(Path::new(STAGING), token);
            written.expect("a user can write");
        }
        let unstaged = driver.volumes.unstage_volume(&volume_id, STAGING);
        unstaged.expect("it is unstaged");
        let made = driver.snapshots.create_snapshot(&CreateSnapshot {
            name: "remote".into(),
            source_volume_id: volume_id,
            parameters: SnapshotParameters::default(),
            requisite: Vec::new(),
        });
        Remote {
            driver: Arc::new(driver),
            snapshot: made.expect("a snapshot").id.to_string(),
        }
    })
}

/// The ID of the snapshot.
pub fn remote_snapshot() -> &'static str {
    &remote().snapshot
}

/// The agent of the other machine, without a network.
struct Direct(Ticket);

struct DirectRanges(OutgoingRead);

impl SnapshotSource for Direct {
    fn node(&self) -> &str {
        "source"
    }

    fn read(&self, from: u64, wanted: Wanted) -> Result<Box<dyn Ranges>> {
        let snapshots = &remote().driver.snapshots;
        loop {
            let outgoing = snapshots.open_granted(&self.0, &|node| node == READER, (from, wanted));
            match outgoing {
                // Other tests of this process read too, and the number of readers is limited.
                Err(Error::Pending { .. }) => std::thread::yield_now(),
                Err(error) => return Err(Error::unreachable("source", error.to_string())),
                Ok(outgoing) => return Ok(Box::new(DirectRanges(outgoing))),
            }
        }
    }
}

impl Ranges for DirectRanges {
    fn next(&mut self) -> Result<Option<SnapshotRange>> {
        let mut range = remote().driver.snapshots.read_next(&mut self.0)?;
        if let Some(range) = &mut range {
            let sent = Checksum::crc32(&range.changed, &range.pieces);
            range.checksum.get_or_insert(sent);
        }
        Ok(range)
    }
}

/// Creates a volume from the snapshot of the other machine.
pub(super) fn receive(
    driver: &Driver,
    name: &str,
    config: VolumeConfig,
    size: u64,
) -> Result<String> {
    let source = remote();
    let offer = source
        .driver
        .snapshots
        .offer(&source.snapshot, READER, &[])?;
    let request = CreateVolume {
        capacity: range(size),
        content_source: Some(ContentSource::Snapshot(source.snapshot.clone())),
        ..create(name, config)
    };
    let snapshot = RemoteSnapshot {
        id: source.snapshot.clone(),
        source: Arc::new(Direct(offer.ticket)),
        offer,
        purpose: Purpose::Restore,
        verify: true,
        is_archived: false,
    };
    let volume = driver.volumes.receive_volume(&request, Ok(snapshot))?;
    Ok(format!("{volume:?}"))
}
