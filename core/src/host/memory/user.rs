//! Users of volumes on a simulated machine: the data that they write must not be lost. None of this
//! counts as an effect of the driver.

use nix::errno::Errno;

use super::content::ContentKind;
use super::machine::Machine;

pub(super) type Answer<T> = std::result::Result<T, Errno>;

impl Machine {
    /// Adds a token to the content of a device if the pool has enough blocks: one for the token
    /// and, if the block that refers to it is shared, one for that.
    pub(super) fn put_token(&mut self, number: u32, token: u64) -> Answer<()> {
        if self.is_hung_loop(number) || self.is_suspended(number) {
            return Err(Errno::EAGAIN);
        }
        let ino = self.image_of(number)?;
        let bytes = self.dev(number)?.bytes;
        let (_, limit) = self.room_of(ino);
        let data = self.data_mut(ino)?;
        let before = data.clone();
        data.content.used_before = true;
        match &mut data.content.kind {
            ContentKind::Fs(fs) => fs.tokens.push(token),
            ContentKind::Raw(tokens) => tokens.push(token),
            ContentKind::Blank => data.content.kind = ContentKind::Raw(vec![token]),
        }
        let room = data.content.fs().map_or(bytes, |fs| fs.bytes.min(bytes));
        let fits = data.content.used() <= room;
        // A shared block gets a new address when it is written; others keep theirs.
        let rewritten = usize::from(self.shares(ino, 0));
        self.disk.changed(ino, rewritten)?;
        if !fits || self.room_of(ino).0 > limit {
            *self.data_mut(ino)? = before;
            return Err(Errno::ENOSPC);
        }
        Ok(())
    }

    /// Frees blocks without content, unless the device forbids discard.
    pub(super) fn trim_volume(&mut self, number: u32) -> Answer<()> {
        if self.dev(number)?.no_discard {
            return Err(Errno::EOPNOTSUPP);
        }
        let ino = self.image_of(number)?;
        self.data_mut(ino)?.reserved = 0;
        Ok(())
    }

    /// Writes back what users have written to a mounted file system. Data for which there is no
    /// space is lost, and the error is reported once.
    pub(super) fn write_back(&mut self, number: u32) -> Answer<()> {
        if self.is_suspended(number) {
            return Err(Errno::EAGAIN);
        }
        let dirty = self.supers.get_mut(&number);
        let dirty = dirty.map_or(Vec::new(), |found| std::mem::take(&mut found.dirty));
        let mut all = Ok(());
        for token in dirty {
            all = all.and(self.put_token(number, token));
        }
        self.sync_loop(number);
        all
    }
}
