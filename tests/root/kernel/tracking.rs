//! Change tracking of the real driver, compared with the bytes themselves: every difference is
//! reported, whatever was done to the volume and to the pool.

use std::collections::BTreeSet;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::fcntl::{FallocateFlags, fallocate};
use slackwater::csi;
use slackwater::host::Host;
use slackwater::host::linux::LinuxHost;
use tonic::{Code, Status};

use super::{GIB, MIB, definition, refused, volume_uuid};
use slackwater_testkit::{Client, Disk, Scratch, Server, block, run};

const BLOCK: u64 = 4096;
const SIZE: u64 = 24 * MIB;

/// A change of the pool between the snapshots.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Pool {
    Xfs,
    Btrfs,
    /// Its images are not written in place, as in an earlier release.
    Earlier,
    /// Content is compressed, so addresses carry less information.
    Compressed,
    /// Blocks are moved, also while they are queried.
    Balanced,
}

impl Pool {
    fn fs(self) -> &'static str {
        match self {
            Pool::Xfs => "xfs",
            Pool::Btrfs | Pool::Earlier | Pool::Compressed | Pool::Balanced => "btrfs",
        }
    }

    /// Whether only changed blocks are reported.
    fn is_exact(self) -> bool {
        matches!(self, Pool::Xfs | Pool::Btrfs | Pool::Earlier)
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

/// A driver, and a raw block volume in use.
struct Tracked {
    pool: Pool,
    client: Client,
    volume: String,
    staging: PathBuf,
    device: PathBuf,
    disk: Disk,
    _server: Server,
    _scratch: Scratch,
}

/// A snapshot: its bytes, and the blocks that were changed since the previous one.
struct Cut {
    id: String,
    bytes: Vec<u8>,
    touched: BTreeSet<u64>,
}

impl Tracked {
    async fn on(pool: Pool) -> Tracked {
        let scratch = Scratch::new();
        let disk = Disk::new(&scratch, "pool", pool.fs(), 3 * GIB);
        if pool == Pool::Compressed {
            let path = disk.mount_point.to_str().unwrap();
            run("mount", &["-o", "remount,compress-force=zstd", path]);
        }
        let alpha = ["--alpha", "snapshot-metadata"];
        let server = Server::spawn(&scratch, &[&definition(&disk.mount_point)], &alpha, &[]);
        server.wait_ready();
        if matches!(pool, Pool::Earlier | Pool::Compressed) {
            let volumes = disk.mount_point.join("volumes");
            run("chattr", &["-C", volumes.to_str().unwrap()]);
        }
        let client = server.client();
        let volume = client.create("v", SIZE, block(), &[]).await.unwrap();
        let staging = scratch.dir("kubelet/staging");
        let device = scratch.join("kubelet/device");
        client.stage(&volume, &staging, block()).await.unwrap();
        let publish = client.publish(&volume, &staging, &device, block(), false);
        publish.await.unwrap();
        Tracked {
            pool,
            client,
            volume,
            staging,
            device,
            disk,
            _server: server,
            _scratch: scratch,
        }
    }

    fn image(&self, snapshot: &str) -> PathBuf {
        let folder = self.disk.mount_point.join("snapshots");
        folder.join(volume_uuid(snapshot)).join("data.img")
    }

    /// Makes some changes, and cuts.
    async fn cut(&self, n: u64, random: &mut Random) -> Cut {
        let mut touched = BTreeSet::new();
        if n % 3 == 2 {
            let size = SIZE + n * MIB;
            self.client.expand(&self.volume, size).await.unwrap();
            let grown = self.client.expand_node(&self.volume, &self.device).await;
            grown.unwrap();
        }
        act(self.pool, &self.device, random, &mut touched);
        let name = format!("s{n}");
        let cut = self
            .client
            .snapshot(&name, &self.volume, &[])
            .await
            .unwrap();
        let bytes = std::fs::read(self.image(&cut.snapshot_id)).unwrap();
        assert_eq!(bytes.len() as i64, cut.size_bytes);
        Cut {
            id: cut.snapshot_id,
            bytes,
            touched,
        }
    }

    /// Repeats the call if blocks were moved while it ran.
    async fn delta(&self, base: &Cut, target: &Cut, offset: u64) -> Vec<(u64, u64)> {
        let request = csi::GetMetadataDeltaRequest {
            base_snapshot_id: base.id.clone(),
            target_snapshot_id: target.id.clone(),
            starting_offset: offset as i64,
            max_results: 3,
            ..Default::default()
        };
        for _ in 0..1000 {
            match self.ask(request.clone()).await {
                Ok(ranges) => {
                    check_order(&ranges, target, offset);
                    return ranges;
                }
                Err(status) => assert_eq!(status.code(), Code::Aborted, "{status:?}"),
            }
        }
        panic!("a balance cannot move blocks at every moment");
    }

    async fn ask(&self, request: csi::GetMetadataDeltaRequest) -> Result<Vec<(u64, u64)>, Status> {
        let mut stub = self.client.metadata();
        let mut stream = stub.get_metadata_delta(request).await?.into_inner();
        let mut ranges = Vec::new();
        while let Some(message) = stream.message().await? {
            assert!(message.block_metadata.len() <= 3);
            let blocks = message.block_metadata.iter();
            ranges.extend(blocks.map(|b| (b.byte_offset as u64, b.size_bytes as u64)));
        }
        Ok(ranges)
    }

    async fn allocated(&self, cut: &Cut) -> Vec<(u64, u64)> {
        let request = csi::GetMetadataAllocatedRequest {
            snapshot_id: cut.id.clone(),
            ..Default::default()
        };
        let mut stub = self.client.metadata();
        let stream = stub.get_metadata_allocated(request).await;
        let mut stream = stream.unwrap().into_inner();
        let mut ranges = Vec::new();
        while let Some(message) = stream.message().await.unwrap() {
            assert_eq!(message.volume_capacity_bytes as usize, cut.bytes.len());
            let blocks = message.block_metadata.iter();
            ranges.extend(blocks.map(|b| (b.byte_offset as u64, b.size_bytes as u64)));
        }
        check_order(&ranges, cut, 0);
        ranges
    }

    async fn end(self, cuts: Vec<Cut>) {
        for cut in cuts {
            self.client.delete_snapshot(&cut.id).await.unwrap();
        }
        let unpublished = self.client.unpublish(&self.volume, &self.device);
        unpublished.await.unwrap();
        let unstaged = self.client.unstage(&self.volume, &self.staging);
        unstaged.await.unwrap();
        self.client.delete(&self.volume).await.unwrap();
    }
}

/// Writes, rewrites, holes and zeros at random places; synced only by chance.
fn act(pool: Pool, device: &Path, random: &mut Random, touched: &mut BTreeSet<u64>) {
    let device = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(device)
        .unwrap();
    for _ in 0..25 {
        let count = 1 + random.below(40);
        let first = random.below(SIZE / BLOCK - count);
        touched.extend(first..first + count);
        let (offset, bytes) = (first * BLOCK, count * BLOCK);
        let range = |mode| {
            let keep = FallocateFlags::FALLOC_FL_KEEP_SIZE;
            fallocate(&device, mode | keep, offset as i64, bytes as i64).unwrap();
        };
        match random.below(10) {
            0 | 1 => range(FallocateFlags::FALLOC_FL_PUNCH_HOLE),
            // A btrfs file with reserved blocks is never compressed again.
            2 if pool != Pool::Compressed => range(FallocateFlags::FALLOC_FL_ZERO_RANGE),
            3 => device
                .write_all_at(&vec![0; bytes as usize], offset)
                .unwrap(),
            n => {
                // Half of it compresses well.
                let mut data = vec![random.below(256) as u8; bytes as usize];
                if n % 2 == 0 {
                    data.fill_with(|| random.below(256) as u8);
                }
                device.write_all_at(&data, offset).unwrap();
            }
        }
    }
    device.sync_all().unwrap();
}

fn check_order(ranges: &[(u64, u64)], target: &Cut, offset: u64) {
    let size = target.bytes.len() as u64;
    assert!(
        ranges
            .iter()
            .all(|(start, bytes)| *bytes > 0 && start + bytes <= size)
    );
    assert!(
        ranges
            .windows(2)
            .all(|pair| pair[0].0 + pair[0].1 <= pair[1].0)
    );
    assert!(
        ranges
            .first()
            .is_none_or(|(start, bytes)| start + bytes > offset)
    );
}

fn blocks_of(ranges: &[(u64, u64)]) -> BTreeSet<u64> {
    ranges
        .iter()
        .flat_map(|(start, bytes)| start / BLOCK..(start + bytes).div_ceil(BLOCK))
        .collect()
}

/// Blocks of the target that differ in the base.
fn differing(base: &Cut, target: &Cut) -> BTreeSet<u64> {
    let mut before = base.bytes.chunks(BLOCK as usize);
    let after = target.bytes.chunks(BLOCK as usize).enumerate();
    after
        .filter(|(_, block)| before.next() != Some(*block))
        .map(|(n, _)| n as u64)
        .collect()
}

async fn nothing_that_differs_is_left_out(pool: Pool) {
    let tracked = Tracked::on(pool).await;
    let mut random = Random(0x5eed);
    let mut cuts: Vec<Cut> = Vec::new();
    for n in 0..7 {
        cuts.push(tracked.cut(n, &mut random).await);
    }
    // Otherwise the pool is not of the expected kind.
    let host = LinuxHost::new(Vec::new());
    let packed = cuts.iter().any(|cut| {
        let map = host.extents(&tracked.image(&cut.id), 0, 100_000).unwrap();
        map.iter().any(|run| run.opaque)
    });
    assert_eq!(packed, pool == Pool::Compressed);
    let done = AtomicBool::new(false);
    let path = tracked.disk.mount_point.to_str().unwrap().to_string();
    std::thread::scope(|scope| {
        if pool == Pool::Balanced {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    run("btrfs", &["balance", "start", "--full-balance", &path]);
                }
            });
        }
        let _done = Done(&done);
        tokio::task::block_in_place(|| {
            let runtime = tokio::runtime::Handle::current();
            runtime.block_on(check(&tracked, &cuts, pool, &mut random));
        });
    });
    let unknown = csi::GetMetadataDeltaRequest {
        base_snapshot_id: cuts[0].id.clone(),
        target_snapshot_id: "nobody".into(),
        ..Default::default()
    };
    refused(tracked.ask(unknown).await, Code::NotFound);
    tracked.end(cuts).await;
}

/// Ends the balance, also when a check panics.
struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

async fn check(tracked: &Tracked, cuts: &[Cut], pool: Pool, random: &mut Random) {
    if pool == Pool::Balanced {
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    for (older, base) in cuts.iter().enumerate() {
        for (newer, target) in cuts.iter().enumerate() {
            let ranges = tracked.delta(base, target, 0).await;
            let reported = blocks_of(&ranges);
            let differs = differing(base, target);
            assert!(
                differs.is_empty() == (older == newer),
                "otherwise the test proves nothing"
            );
            let left_out: Vec<_> = differs.difference(&reported).collect();
            assert!(
                left_out.is_empty(),
                "{pool:?}: {left_out:?} of {older} to {newer}"
            );
            let offset = random.below(target.bytes.len() as u64);
            let rest = blocks_of(&tracked.delta(base, target, offset).await);
            let left_out: Vec<_> = differs.range(offset / BLOCK..).collect();
            assert!(
                left_out.iter().all(|n| rest.contains(n)),
                "from {offset} on"
            );
            if pool.is_exact() {
                let between = &cuts[older.min(newer) + 1..=older.max(newer)];
                let grown = (base.bytes.len() / BLOCK as usize) as u64;
                let touched: BTreeSet<u64> = between
                    .iter()
                    .flat_map(|cut| &cut.touched)
                    .copied()
                    .collect();
                let more = reported
                    .iter()
                    .find(|n| **n < grown && !touched.contains(n));
                assert_eq!(more, None, "{pool:?}: reported, but not changed");
            }
        }
        let reported = blocks_of(&tracked.allocated(base).await);
        let blocks = base.bytes.chunks(BLOCK as usize).enumerate();
        let mut data = blocks.filter(|(_, block)| block.iter().any(|byte| *byte != 0));
        assert!(
            data.all(|(n, _)| reported.contains(&(n as u64))),
            "{pool:?}"
        );
        assert!(
            reported.len() < base.bytes.len() / BLOCK as usize,
            "not everything"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn on_xfs_exactly_the_differing_blocks_are_reported() {
    nothing_that_differs_is_left_out(Pool::Xfs).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn on_btrfs_exactly_the_differing_blocks_are_reported() {
    nothing_that_differs_is_left_out(Pool::Btrfs).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn on_btrfs_of_an_earlier_release_exactly_the_differing_blocks_are_reported() {
    nothing_that_differs_is_left_out(Pool::Earlier).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn on_compressed_btrfs_all_differing_blocks_are_reported() {
    nothing_that_differs_is_left_out(Pool::Compressed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn on_btrfs_under_balance_all_differing_blocks_are_reported() {
    nothing_that_differs_is_left_out(Pool::Balanced).await;
}
