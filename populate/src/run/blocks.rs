//! Writes one object to the volume: as blocks, as a qcow2 image that is converted, or as an archive that
//! is unpacked.

use std::io::{self, Read};

use super::{Attempt, Opened, add_archive, drain};
use crate::config::Target;
use crate::failure::{Failure, Next, Result};
use crate::format::qcow2::{Header, Image};
use crate::format::{Compression, Format, HEAD_BYTES};
use crate::target::disk::{Disk, open_folder};
use crate::target::tree::{Style, check_empty};

/// What is written at once.
const CHUNK_BYTES: usize = 1 << 20;

impl Attempt<'_> {
    /// Where blocks are written: the device, or a file.
    pub(super) fn disk(&self) -> Result<Disk> {
        match &self.target {
            Opened::Device(disk) => disk.try_clone(),
            Opened::Folder(folder, capacity) => {
                let name = &self.config.file_name;
                check_empty(folder, Some(name))?;
                Disk::file(folder, name, *capacity)
            }
        }
    }

    /// Finds out what the content is, and writes it. Everything is read to its end, because the
    /// checksum is of all of it. An image whose blocks are in another order is returned, in a
    /// temporary file.
    pub(super) fn write_content(
        &self,
        inner: impl Read,
        validator: Option<&str>,
    ) -> Result<Option<Disk>> {
        let (head, inner) = peek(inner)?;
        let compression = Compression::of(&head);
        let content = self.decode(compression, io::Cursor::new(head).chain(inner));
        let (head, rest) = peek(content)?;
        let format = self.config.format.unwrap_or_else(|| Format::of(&head));
        if format == Format::Qcow2 {
            // Before all of it is received.
            self.check_size(&Header::parse(&head)?)?;
        }
        let mut content = io::Cursor::new(head).chain(rest);
        match format {
            Format::Raw => {
                let disk = self.disk()?;
                disk.clear()?;
                let validator = validator.filter(|_| compression == Compression::None);
                self.raw(content, &disk, 0, validator)?;
                Ok(None)
            }
            Format::Tar => {
                let mut tree = self.tree(Style::Archive)?;
                add_archive(&mut tree, &mut content)?;
                tree.finish()?;
                Ok(None)
            }
            Format::Qcow2 => {
                let image = self.temporary()?;
                self.copy(&mut content, &image, &mut 0, false)?;
                Ok(Some(image))
            }
        }
    }

    /// Like [`Attempt::write_content`], for content that must be a disk.
    pub(super) fn write_disk_content(&self, inner: impl Read) -> Result<Option<Disk>> {
        let (head, inner) = peek(inner)?;
        match self.config.format.unwrap_or_else(|| Format::of(&head)) {
            Format::Tar => Err(Failure::refused(
                "FormatRefused",
                "the file of the image is an archive",
            )),
            _ => self.write_content(io::Cursor::new(head).chain(inner), None),
        }
    }

    /// Writes blocks from a position to the end. With a validator, prints how much is durable.
    pub(super) fn raw(
        &self,
        mut content: impl Read,
        disk: &Disk,
        from: u64,
        validator: Option<&str>,
    ) -> Result<()> {
        if let Some(validator) = validator {
            self.report.set_validator(validator);
        }
        let mut at = from;
        let copied = self.copy(&mut content, disk, &mut at, validator.is_some());
        if let Err(failure) = copied {
            if validator.is_some() && failure.next == Next::Again && disk.sync().is_ok() {
                self.report.set_durable(at);
            }
            return Err(failure);
        }
        disk.finish(at, self.report)
    }

    fn copy(
        &self,
        content: &mut impl Read,
        disk: &Disk,
        at: &mut u64,
        is_durable: bool,
    ) -> Result<()> {
        let mut chunk = vec![0; CHUNK_BYTES];
        let mut durable = *at;
        loop {
            let (count, error) = fill(content, &mut chunk);
            disk.write(*at, &chunk[..count])?;
            *at += count as u64;
            self.report.count(|numbers| numbers.written = *at);
            if is_durable && *at - durable >= self.config.limits.durable_bytes {
                disk.sync()?;
                durable = *at;
                self.report.set_durable(durable);
            }
            match error {
                Some(error) => return Err(Failure::content("the content", error)),
                None if count == 0 => return drain(content),
                None => {}
            }
        }
    }

    /// A file for an image that cannot be read in one direction.
    fn temporary(&self) -> Result<Disk> {
        match (&self.config.scratch, &self.config.target) {
            (Some(path), _) | (None, Target::Filesystem(path)) => {
                let (_, capacity) = open_folder(path)?;
                Disk::unnamed(path, capacity)
            }
            (None, Target::Block(_)) => {
                let what = "a qcow2 image for a block volume needs a scratch folder, because its blocks are in no order";
                Err(Failure::refused("ScratchNeeded", what))
            }
        }
    }

    fn check_size(&self, header: &Header) -> Result<()> {
        match header.size > self.target.capacity() {
            true => {
                let what = format!(
                    "the qcow2 image has a disk of {} bytes, and the volume {}",
                    header.size,
                    self.target.capacity()
                );
                Err(Failure::refused("TooLarge", what))
            }
            false => Ok(()),
        }
    }

    /// Writes the blocks of an image in a temporary file.
    pub(super) fn convert(&self, image: &Disk) -> Result<()> {
        let image = Image::open(image.as_file())?;
        self.check_size(&image.header)?;
        let disk = self.disk()?;
        disk.clear()?;
        image.read(|at, bytes| {
            self.client.check_time()?;
            disk.write(at, bytes)?;
            self.report
                .count(|numbers| numbers.written = at + bytes.len() as u64);
            Ok(())
        })?;
        disk.finish(image.header.size, self.report)
    }
}

/// Reads until the chunk is full, the content ends, or reading fails.
fn fill(content: &mut impl Read, chunk: &mut [u8]) -> (usize, Option<io::Error>) {
    let mut done = 0;
    while done < chunk.len() {
        match content.read(&mut chunk[done..]) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return (done, Some(error)),
        }
    }
    (done, None)
}

/// The first bytes of a stream.
fn peek<R: Read>(mut inner: R) -> Result<(Vec<u8>, R)> {
    let mut head = vec![0; HEAD_BYTES];
    let (count, error) = fill(&mut inner, &mut head);
    if let Some(error) = error {
        return Err(Failure::content("the content", error));
    }
    head.truncate(count);
    Ok((head, inner))
}
