//! A writer at the source: beside a copy to another node, and beside a local snapshot and a local reader at
//! the same rate.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::libc;

use super::{Aligned, MIB, Pairs, Sent, given};

/// The rate of the copy and of the reader in MiB/s.
const RATE: u64 = 64;
const BLOCK: usize = 4096;

/// Synchronous random writes of 4 KiB each, for a time. Returns their number in a second.
fn write(device: &Path, time: Duration, bytes: u64) -> f64 {
    let mut options = OpenOptions::new();
    let options = options
        .write(true)
        .custom_flags(libc::O_DIRECT | libc::O_DSYNC);
    let device = options.open(device).unwrap();
    let block = Aligned([0x5a; BLOCK]);
    let (start, mut count, mut at) = (Instant::now(), 0_u64, 1_u64);
    while start.elapsed() < time {
        // (the sequence of MMIX)
        at = at
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        let place = (at >> 11) % (bytes / BLOCK as u64) * BLOCK as u64;
        device.write_all_at(&block.0, place).unwrap();
        count += 1;
    }
    count as f64 / start.elapsed().as_secs_f64()
}

/// Reads a file again and again at the rate of the copy, until it is to stop.
fn read(image: &Path, bytes: u64, stop: &AtomicBool) {
    let mut options = OpenOptions::new();
    let options = options.read(true).custom_flags(libc::O_DIRECT);
    let file = options.open(image).unwrap();
    let mut block = Box::new(Aligned([0; MIB as usize]));
    let (start, mut count) = (Instant::now(), 0_u64);
    while !stop.load(Ordering::SeqCst) {
        let place = count * MIB % bytes;
        file.read_exact_at(&mut block.0, place).unwrap();
        count += 1;
        let due = start + Duration::from_secs_f64(count as f64 / RATE as f64);
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
    }
}

/// Both in turns. There is a snapshot in both cases, with which the volume shares its blocks.
pub async fn measure() {
    let rate = format!("{RATE}Mi");
    let sent = Sent::new(&["--copy-rate", &rate]).await;
    let bytes = super::bytes();
    let device = sent.source().scratch.dir("kubelet").join("source.device");
    let image = sent.source().image("snapshots", &sent.snapshot);
    let time = Duration::from_millis(given("MILLISECONDS", 3000) as u64).min(
        Duration::from_secs_f64(bytes as f64 / (RATE * MIB) as f64 * 0.8),
    );
    // The blocks that the snapshot shares are copied once, before the measurement.
    tokio::task::block_in_place(|| write(&device, time, bytes));
    let mut pairs = Pairs::default();
    for round in 0..given("ROUNDS", 5) {
        let name = format!("beside-{round}");
        let writing = async {
            tokio::time::sleep(Duration::from_millis(200)).await;
            let device = device.clone();
            tokio::task::spawn_blocking(move || write(&device, time, bytes))
                .await
                .unwrap()
        };
        let (_, ours) = tokio::join!(sent.receive(&name, false), writing);
        let stop = AtomicBool::new(false);
        let hand = tokio::task::block_in_place(|| {
            std::thread::scope(|scope| {
                scope.spawn(|| read(&image, bytes, &stop));
                let hand = write(&device, time, bytes);
                stop.store(true, Ordering::SeqCst);
                hand
            })
        });
        pairs.add(ours, hand);
    }
    println!(
        "| writes/s beside a copy at {RATE} MiB/s / beside a local reader at that rate | {} |",
        pairs.ratio()
    );
    sent.end().await;
}
