from django.db import migrations, models

from outbox.contrib.django.database.columns import compare_as_postgresql


class Migration(migrations.Migration):

    initial = True

    dependencies = [
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
        # MariaDB ends a transaction at each of these statements, and Django refuses them in one.
        migrations.RunPython(compare_as_postgresql('outbox_erasure'), migrations.RunPython.noop, atomic=False),
    ]
