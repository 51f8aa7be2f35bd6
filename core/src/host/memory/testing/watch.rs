//! Observing a simulated machine, and planning its faults.

use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;

use super::super::content::{Content, ContentKind};
use super::super::disk::{Disk, Ino, Node};
use super::super::mounts::Shown;
use super::super::{FaultMode, MemoryHost};

impl MemoryHost {
    /// Lets time pass on this machine; no other machine is affected.
    pub fn pass_time(&self, time: Duration) {
        self.lock().passed += time;
    }

    /// Sets whether other threads may run after each effect, which is the default. Where calls are
    /// sequential this gains nothing, and on a busy machine each yield takes long.
    pub fn take_turns(&self, turns: bool) {
        self.lock().turns = turns;
    }

    /// Queries that a test makes for itself: they are neither counted nor made to fail, and dead or
    /// hanging disks do not affect them. Those of other threads at the same time are not changed.
    pub fn without_faults<T>(&self, looks: impl FnOnce(&MemoryHost) -> T) -> T {
        self.lock().faults.begin_exempt();
        let result = looks(self);
        self.lock().faults.end_exempt();
        result
    }

    /// Number of effects so far, including refused ones.
    pub fn effects(&self) -> usize {
        self.lock().faults.log.len()
    }

    /// The effects so far, each with its object.
    pub fn effect_log(&self) -> Vec<String> {
        self.lock().faults.log.clone()
    }

    /// Plans a fault for the `n`-th effect from now on; 1 is the next. Several faults can be
    /// planned.
    pub fn fail_effect(&self, n: usize, mode: FaultMode) {
        self.lock().faults.plan(n, mode);
    }

    /// Makes the `n`-th query from now on fail with an errno; 1 is the next. A query is any other
    /// call of the host that can fail; the driver must never take a failed query for "does not
    /// exist".
    pub fn fail_query(&self, n: usize, errno: Errno) {
        self.lock().faults.plan_query(n, errno);
    }

    /// Number of queries so far.
    pub fn looks(&self) -> usize {
        self.lock().faults.looks
    }

    /// How often all devices of a thin pool were read from its metadata so far.
    pub fn metadata_reads(&self) -> usize {
        self.lock().faults.metadata_reads
    }

    /// Makes every effect of this name fail from now on; `None` ends that.
    pub fn fail_always(&self, name: &str, errno: Option<Errno>) {
        self.lock().faults.always(name, errno);
    }

    /// Number of planned faults that have not occurred yet.
    pub fn faults_left(&self) -> usize {
        self.lock().faults.left()
    }

    /// Removes all planned faults.
    pub fn clear_faults(&self) {
        self.lock().faults.clear();
    }

    /// Descriptions of the invariants that were broken.
    pub fn violations(&self) -> Vec<String> {
        self.lock().violations.clone()
    }

    /// Why a copy must never be served, if it must not: it is torn, or not finished.
    pub fn flaw(&self, image: &Path) -> Option<&'static str> {
        let machine = self.lock();
        let ino = machine.find(0, image).ok().flatten()?;
        machine.disk.file(ino).ok()?.live.flaw
    }

    /// The tokens of the file system or of raw writes in an image. Data that a mounted file system
    /// has not written back is missing.
    pub fn image_tokens(&self, image: &Path) -> Option<Vec<u64>> {
        let machine = self.lock();
        let ino = machine.find(0, image).ok().flatten()?;
        let content = &machine.disk.file(ino).ok()?.live.content;
        Some(content.tokens().to_vec())
    }

    /// All files and directories below a directory, as relative paths.
    pub fn files_below(&self, folder: &Path) -> Vec<String> {
        let machine = self.lock();
        let mut paths = Vec::new();
        if let Ok(Some(ino)) = machine.find(0, folder) {
            machine.disk.paths_below(ino, "", &mut paths);
        }
        paths
            .iter()
            .map(|path| path.trim_start_matches('/').to_string())
            .collect()
    }

    /// Files and directories that the driver has created at CSI paths.
    pub fn targets(&self) -> Vec<PathBuf> {
        self.lock().targets.keys().cloned().collect()
    }

    /// Mount points of everything that was mounted since boot.
    pub fn mounted(&self) -> Vec<PathBuf> {
        let machine = self.lock();
        let driver_mounts = machine
            .mounts
            .iter()
            .filter(|mounted| mounted.shown != Shown::Base);
        driver_mounts
            .map(|mounted| mounted.line.mount_point.clone())
            .collect()
    }

    /// Numbers of loop devices, and whether they are open.
    pub fn loop_numbers(&self) -> Vec<(u32, bool)> {
        let machine = self.lock();
        machine
            .loops
            .keys()
            .map(|number| (*number, machine.openers_of(*number) > 0))
            .collect()
    }
}

impl Disk {
    /// Every path of a file or directory below an inode.
    fn paths_below(&self, ino: Ino, prefix: &str, into: &mut Vec<String>) {
        let Some(Node::Dir(dir)) = self.nodes.get(&ino) else {
            return;
        };
        for (name, child) in &dir.live {
            let path = format!("{prefix}/{name}");
            into.push(path.clone());
            self.paths_below(*child, &path, into);
        }
    }
}

impl Content {
    /// The tokens that users have written.
    pub(super) fn tokens(&self) -> &[u64] {
        match &self.kind {
            ContentKind::Fs(fs) => &fs.tokens,
            ContentKind::Raw(tokens) => tokens,
            ContentKind::Blank => &[],
        }
    }
}
