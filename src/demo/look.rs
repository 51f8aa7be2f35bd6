//! Looking what is left, rather than believing that nothing is.

use std::path::Path;
use std::time::{Duration, Instant};

use super::ground::Ground;

/// The kernel ends a loop device a moment after its last opener has gone.
const SETTLE: Duration = Duration::from_secs(3);
const POLL: Duration = Duration::from_millis(50);

/// Everything of the demo that is still there.
pub(super) async fn around(ground: &Ground) -> Vec<String> {
    let begun = Instant::now();
    loop {
        let left = look(ground);
        if left.is_empty() || begun.elapsed() > SETTLE {
            return left;
        }
        tokio::time::sleep(POLL).await;
    }
}

fn look(ground: &Ground) -> Vec<String> {
    let loops = ground.loops().into_iter();
    let loops = loops.map(|status| format!("loop device /dev/loop{}", status.number));
    let mounts = ground.mounts().into_iter();
    let mounts = mounts.map(|mount| format!("mount {}", mount.mount_point.display()));
    let processes = drivers_on(&ground.socket()).into_iter();
    let processes = processes.map(|id| format!("process {id}"));
    let files = std::fs::symlink_metadata(&ground.folder).is_ok();
    let files = files.then(|| format!("files in {}", ground.folder.display()));
    loops.chain(mounts).chain(processes).chain(files).collect()
}

/// Processes that were told to serve on this socket.
fn drivers_on(socket: &Path) -> Vec<String> {
    let endpoint = format!("unix://{}", socket.display());
    let Ok(processes) = std::fs::read_dir("/proc") else {
        return vec!["that can't be told: /proc can't be read".into()];
    };
    processes
        .flatten()
        .filter(|process| {
            let words = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
            let mut words = words.split(|byte| *byte == 0).skip(1);
            words.next() == Some(b"serve") && words.any(|word| word == endpoint.as_bytes())
        })
        .map(|process| process.file_name().to_string_lossy().into_owned())
        .collect()
}
