from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('outbox', '0011_dead_letter_note'),
    ]

    operations = [
        migrations.CreateModel(
            name='ErasureEntry',
            fields=[
                ('pk', models.CompositePrimaryKey('kind', 'topic', 'value', blank=True, editable=False, primary_key=True, serialize=False)),
                ('kind', models.CharField(max_length=15)),
                ('topic', models.CharField(max_length=127)),
                ('value', models.CharField(max_length=64)),
                ('erased_at', models.DateTimeField()),
            ],
            options={
                'verbose_name_plural': 'erasure entries',
                'db_table': 'outbox_erased',
            },
        ),
        migrations.CreateModel(
            name='SubjectKey',
            fields=[
                ('key_id', models.UUIDField(primary_key=True, serialize=False)),
                ('subject', models.CharField(max_length=255, null=True, unique=True)),
                ('wrapped', models.BinaryField(null=True)),
                ('created_at', models.DateTimeField()),
                ('deleted_at', models.DateTimeField(null=True)),
            ],
            options={
                'db_table': 'outbox_subject_key',
                'managed': False,
            },
        ),
    ]
