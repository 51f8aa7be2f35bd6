//! Watching a simulated machine, and planning its faults.

use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;

use super::mounts::Shown;
use super::{FaultMode, MemoryHost};

impl MemoryHost {
    /// Time passes on this machine; on others not.
    pub fn pass_time(&self, time: Duration) {
        self.lock().passed += time;
    }

    /// Whether other threads get their turn after each effect, as they do unless this is called.
    /// Where calls come one at a time that gains nothing, and on a busy machine each turn that is
    /// given away is a long one.
    pub fn take_turns(&self, turns: bool) {
        self.lock().turns = turns;
    }

    /// Looks by which a test sees for itself: neither counted nor made to fail, and whatever lasts
    /// is not in their way.
    pub fn aside<T>(&self, looks: impl FnOnce(&MemoryHost) -> T) -> T {
        let before = std::mem::replace(&mut self.lock().faults.aside, true);
        let seen = looks(self);
        self.lock().faults.aside = before;
        seen
    }

    /// Effects performed so far, refused ones included.
    pub fn effects(&self) -> usize {
        self.lock().faults.log.len()
    }

    /// The effects so far, each with what it was about.
    pub fn effect_log(&self) -> Vec<String> {
        self.lock().faults.log.clone()
    }

    /// The `n`-th effect from now on goes wrong; 1 is the next. May be called for several.
    pub fn fail_effect(&self, n: usize, mode: FaultMode) {
        self.lock().faults.plan(n, mode);
    }

    /// The `n`-th look from now on fails with an errno; 1 is the next. A look is any other call of
    /// the host that can fail; a failed look must never be taken for "nothing there".
    pub fn fail_look(&self, n: usize, errno: Errno) {
        self.lock().faults.plan_look(n, errno);
    }

    /// Looks so far.
    pub fn looks(&self) -> usize {
        self.lock().faults.looks
    }

    /// Every effect of this name is refused from now on; `None` ends that.
    pub fn fail_always(&self, name: &str, errno: Option<Errno>) {
        self.lock().faults.always(name, errno);
    }

    /// Planned faults that have not come true yet.
    pub fn faults_left(&self) -> usize {
        self.lock().faults.left()
    }

    /// No more faults.
    pub fn clear_faults(&self) {
        self.lock().faults.clear();
    }

    /// Invariants that were broken, in words.
    pub fn violations(&self) -> Vec<String> {
        self.lock().violations.clone()
    }

    /// Why a copy must never be served, if so: it's torn, or not finished.
    pub fn flaw(&self, image: &Path) -> Option<&'static str> {
        let machine = self.lock();
        let ino = machine.find(0, image).ok().flatten()?;
        machine.disk.file(ino).ok()?.live.flaw
    }

    /// The numbers in a file system or of raw writes on an image, as the image has them: what a
    /// mounted file system hasn't written back isn't there.
    pub fn image_tokens(&self, image: &Path) -> Option<Vec<u64>> {
        let machine = self.lock();
        let ino = machine.find(0, image).ok().flatten()?;
        let content = &machine.disk.file(ino).ok()?.live.content;
        Some(content.tokens().to_vec())
    }

    /// All files and directories below a folder, as paths relative to it.
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

    /// Callers' leaves that exist.
    pub fn targets(&self) -> Vec<PathBuf> {
        self.lock().targets.keys().cloned().collect()
    }

    /// Mount points of what was mounted since boot.
    pub fn mounted(&self) -> Vec<PathBuf> {
        let machine = self.lock();
        let ours = machine
            .mounts
            .iter()
            .filter(|mounted| mounted.shown != Shown::Base);
        ours.map(|mounted| mounted.line.mount_point.clone())
            .collect()
    }

    /// Numbers of loop devices, with whether somebody has them open.
    pub fn loop_numbers(&self) -> Vec<(u32, bool)> {
        let machine = self.lock();
        machine
            .loops
            .keys()
            .map(|number| (*number, machine.openers_of(*number) > 0))
            .collect()
    }
}
