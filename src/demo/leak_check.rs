//! Checks what is left, instead of assuming that nothing is.

use std::time::{Duration, Instant};

use super::scratch_pool::ScratchPool;
use crate::cut::guard;

/// The kernel detaches a loop device a moment after its last opener has closed it.
const DETACH_TIMEOUT: Duration = Duration::from_secs(3);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Everything of the demo that still exists.
pub(super) async fn leaks(pool: &ScratchPool) -> Vec<String> {
    let begun = Instant::now();
    loop {
        let left = look(pool);
        if left.is_empty() || begun.elapsed() > DETACH_TIMEOUT {
            return left;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

fn look(pool: &ScratchPool) -> Vec<String> {
    let loops = pool.loops().into_iter();
    let loops = loops.map(|status| format!("loop device /dev/loop{}", status.number));
    let mounts = pool.mounts().into_iter();
    let mounts = mounts.map(|mount| format!("mount {}", mount.mount_point.display()));
    let processes = processes_of(pool).into_iter();
    let processes = processes.map(|id| format!("process {id}"));
    let files = std::fs::symlink_metadata(&pool.folder).is_ok();
    let files = files.then(|| format!("files in {}", pool.folder.display()));
    let thin = pool.thin_leaks();
    loops
        .chain(mounts)
        .chain(processes)
        .chain(files)
        .chain(thin)
        .collect()
}

/// Drivers, guards and hooks: processes whose arguments contain the demo's directory.
fn processes_of(pool: &ScratchPool) -> Vec<String> {
    let folder = pool.folder.display().to_string();
    let commands = [&b"serve"[..], b"demo-hook"];
    let is_guard = |program: &[u8]| program.ends_with(guard::PROGRAM.as_bytes());
    let Ok(processes) = std::fs::read_dir("/proc") else {
        return vec!["unknown, because /proc cannot be read".into()];
    };
    processes
        .flatten()
        .filter(|process| {
            let words = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
            let mut words = words.split(|byte| *byte == 0);
            let names_folder = |word: &[u8]| String::from_utf8_lossy(word).contains(&folder);
            let is_ours = words.next().is_some_and(is_guard)
                || words.next().is_some_and(|word| commands.contains(&word));
            is_ours && words.any(names_folder)
        })
        .map(|process| process.file_name().to_string_lossy().into_owned())
        .collect()
}
