//! What users of the namespace do to the cache, and other controllers.

use super::*;

impl World {
    /// A snapshot that did not come from this claim: with the content of the source and a record, or not.
    pub(super) fn appears(&mut self, is_good: bool) {
        let Some(key) = self.key(self.generation) else {
            return;
        };
        let name = key.snapshot_name();
        if self.snapshots.len() >= MOST || self.snapshots.iter().any(|one| one.name == name) {
            return;
        }
        let uid = format!("sn-{}", self.next());
        self.add_snapshot(&name, &uid, "of another claim");
        let one = self.snapshots.last_mut().unwrap();
        one.volume = Some("of another claim".into());
        one.is_ready = true;
        one.cut = is_good.then(|| source(self.generation).1.version());
        one.record = is_good.then(|| key.to_string());
        // Until it is recorded and used, seconds pass.
        self.seconds += 1;
    }

    pub(super) fn fake_mark(&mut self) {
        let Some((key, prime)) = self.key(self.generation).zip(self.prime.clone()) else {
            return;
        };
        let name = key.snapshot_name();
        let is_there = self.snapshots.iter().any(|one| one.name == name);
        if self.snapshots.len() < MOST && !is_there && !is_leaving(&prime) {
            let uid = format!("sn-{}", self.next());
            self.add_snapshot(&name, &uid, self::uid(&prime));
            let seen = self.seen();
            self.annotate_prime(&seen, &[(SNAPSHOT, Some(&uid))]);
        }
    }

    pub(super) fn old_volume(&mut self) {
        let version = self.next();
        let Some(prime) = &mut self.prime else { return };
        if restored_from(prime).is_none() || volume_name(prime).is_some() || is_leaving(prime) {
            return;
        }
        let name = format!("pv-{version}");
        let mut old = volume();
        old.metadata.name = Some(name.clone());
        old.metadata.resource_version = Some(version.clone());
        old.metadata.creation_timestamp = object(json!(time(-1000).to_string()));
        let spec = old.spec.as_mut().unwrap();
        spec.claim_ref
            .as_mut()
            .unwrap()
            .uid
            .clone_from(&prime.metadata.uid);
        spec.csi.as_mut().unwrap().volume_handle.clone_from(&name);
        set_bound(prime, &name);
        prime.metadata.resource_version = Some(version);
        self.restored.insert(name.clone(), None);
        self.volumes.insert(name, old);
    }

    pub(super) fn fake_prime(&mut self) {
        let (Some(key), None) = (self.key(self.generation), &self.prime) else {
            return;
        };
        let node = annotation(&self.claim, SELECTED_NODE).map(str::to_string);
        let seen = self.seen();
        self.create_prime(&seen, node.as_deref(), Some(&key.snapshot_name()));
    }

    pub(super) fn other_pod(&mut self) {
        let Some(prime) = self.prime.as_ref().filter(|prime| is_bound(prime)) else {
            return;
        };
        let bound = volume_name(prime).and_then(|name| self.volumes.get(name));
        if bound.is_some_and(|volume| prime::bound_to(volume) == Some(uid(prime))) {
            self.shared = Some(uid(prime).into());
            self.tainted.extend(volume_name(prime).map(str::to_string));
        }
    }
}
