//! A folder with hooks: small programs that log their actions.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use slackwater::error::{Result, chain};
use slackwater::hook::{HookDefinition, HookParts, Hooks, LocalHooks, Quiesced};
use slackwater::host::linux::LinuxHost;

/// Nothing here takes as long, unless it hangs.
pub const LONG: Duration = Duration::from_secs(60);
/// For sessions that should end by themselves but do not. For all others, it would be too short on
/// a slow machine.
pub const GRACE: Duration = Duration::from_millis(300);

/// A folder that all users may write to, and that is removed at the end.
pub struct HookFolder(tempfile::TempDir);

impl HookFolder {
    pub fn new() -> HookFolder {
        let folder = tempfile::Builder::new()
            .prefix("slackwater-hooks-")
            .tempdir()
            .unwrap();
        fs::set_permissions(folder.path(), Permissions::from_mode(0o777)).unwrap();
        HookFolder(folder)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A hook with this name for all volumes; `body` is a script that runs in the folder.
    pub fn hook(&self, name: &str, body: &str) -> HookDefinition {
        self.hook_of(name, body, |_| {})
    }

    pub fn hook_of(
        &self,
        name: &str,
        body: &str,
        change: impl FnOnce(&mut HookParts),
    ) -> HookDefinition {
        let program = self.path(&format!("{name}.sh"));
        let text = format!("cd {}\n{body}\n", self.0.path().display());
        fs::write(&program, text).unwrap();
        // Whatever the umask is: another user may have to read it.
        fs::set_permissions(&program, Permissions::from_mode(0o644)).unwrap();
        let mut parts = HookParts {
            name: name.into(),
            command: script(&program),
            volume: Some("*".into()),
            ..HookParts::default()
        };
        change(&mut parts);
        HookDefinition::try_from(parts).unwrap()
    }

    /// The content of a file in the folder; empty if it does not exist.
    pub fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    pub fn lines(&self, name: &str) -> Vec<String> {
        self.read(name).lines().map(Into::into).collect()
    }

    pub fn touch(&self, name: &str) {
        fs::write(self.path(name), "").unwrap();
    }
}

/// A shell reads the script instead of executing it: a file cannot be executed while a child of
/// another thread still has it open for writing.
pub fn script(path: &Path) -> Vec<String> {
    vec!["/bin/sh".into(), path.to_str().unwrap().into()]
}

pub fn local(hooks: Vec<HookDefinition>) -> LocalHooks {
    LocalHooks::new(hooks, Arc::new(LinuxHost::new(Vec::new()))).with_grace(LONG)
}

/// Quiesces with the hooks of these names.
pub fn quiesce(hooks: &LocalHooks, names: &[&str], timeout: Duration) -> Result<Box<dyn Quiesced>> {
    let names: Vec<String> = names.iter().map(|name| name.to_string()).collect();
    hooks.quiesce(&names, timeout)
}

/// The text of an error.
pub fn refused<T>(done: Result<T>) -> String {
    match done {
        Ok(_) => panic!("it should have failed"),
        Err(error) => chain(&error),
    }
}

pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < LONG, "{what} does not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a process runs. A process that has ended but was not reaped does not.
pub fn runs(pid: &str) -> bool {
    let status = fs::read_to_string(Path::new("/proc").join(pid.trim()).join("stat"));
    status.is_ok_and(|status| {
        let after = status.rsplit(')').next().unwrap_or_default();
        !after.trim_start().starts_with('Z')
    })
}
